// Drafts by llama.cpp: `llama_drafts MODEL HEAD COUNT MASK <texts`, each text a line: how many tokens, and the tokens.
// HEAD is EAGLE-3's, or DFlash's, which drafts for COUNT tokens MASK. Prints the drafts after each text, a line each.
// See tests/models/families/test_drafts_of_llama_cpp.py for how to build it.
#include "llama.h"
#include "llama-ext.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

static void check(bool right, const char * what) {
    if (!right) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

// A batch of entries, each with a token or numbers or both.
struct Batch {
    llama_context * context;
    llama_batch_ext * entries;

    explicit Batch(llama_context * context) : context(context), entries(llama_batch_ext_init(context)) {}
    ~Batch() { llama_batch_ext_free(entries); }

    void add(llama_token token, const float * numbers, size_t size, llama_pos position, bool output) {
        const llama_embd embedded = {numbers, 1, size};
        const int index = token < 0 ? llama_batch_ext_add_embd(entries, 0, embedded)
                                    : llama_batch_ext_add_token(entries, 0, token);
        check(index >= 0, "an entry was not added");
        if (token >= 0 && numbers) {
            check(llama_batch_ext_set_embd_token(entries, index, embedded), "a token got no numbers");
        }
        llama_batch_ext_set_pos(entries, index, &position);
        llama_batch_ext_set_output_logits(entries, index, output);
    }

    void run(llama_process_type kind) { check(llama_process(context, kind, entries) == 0, "a batch failed"); }
};

struct Pair {
    llama_context *target, *head;
    int layers, vocab;  // of the target
    size_t width, own;  // of the hidden states of both

    llama_token likeliest(int row) const {
        const float * scores = llama_get_logits_ith(head, row);
        return (llama_token) (std::max_element(scores, scores + vocab) - scores);
    }

    // What the head reads of each token, one after the other.
    std::vector<float> read(const std::vector<llama_token> & text) const {
        Batch batch(target);
        for (size_t place = 0; place < text.size(); ++place) {
            batch.add(text[place], nullptr, 0, (llama_pos) place, true);
        }
        batch.run(LLAMA_PROCESS_TYPE_DECODE);
        const llama_model * model = llama_get_model(head);
        const size_t count = llama_model_target_layer_ids_n(model);
        std::vector<float> found(text.size() * count * width);
        for (size_t part = 0; part < count; ++part) {
            const int layer = llama_model_target_layer_ids(model)[part];
            const float * stream = layer < layers ? llama_get_embeddings_layer_inp(target, layer)
                                                  : llama_get_embeddings_nextn(target);
            check(stream, "a layer's inputs are missing");
            for (size_t place = 0; place < text.size(); ++place) {
                std::copy_n(stream + place * width, width, &found[(place * count + part) * width]);
            }
        }
        return found;
    }
};

static std::vector<llama_token> eagle(const Pair & pair, const std::vector<llama_token> & text, llama_token last, int count) {
    const std::vector<float> read = pair.read(text);
    const size_t size = read.size() / text.size();
    Batch encoded(pair.head);
    for (size_t place = 0; place < text.size(); ++place) {
        encoded.add(-1, &read[place * size], size, (llama_pos) place, true);
    }
    encoded.run(LLAMA_PROCESS_TYPE_ENCODE);
    const float * first = llama_get_embeddings_nextn(pair.head);
    check(first, "the encoder gave no states");
    std::vector<float> states(first, first + text.size() * pair.own);
    if (text.size() > 1) {
        Batch batch(pair.head);
        for (size_t place = 0; place + 1 < text.size(); ++place) {
            batch.add(text[place + 1], &states[place * pair.own], pair.own, (llama_pos) place, false);
        }
        batch.run(LLAMA_PROCESS_TYPE_DECODE);
    }
    std::vector<llama_token> drafts = {last};
    std::vector<float> state(states.end() - (ptrdiff_t) pair.own, states.end());
    for (size_t place = text.size() - 1; (int) drafts.size() <= count; ++place) {
        Batch batch(pair.head);  // alone: scores of a batch are those of its first entries
        batch.add(drafts.back(), state.data(), pair.own, (llama_pos) place, true);
        batch.run(LLAMA_PROCESS_TYPE_DECODE);
        const float * own = llama_get_embeddings_nextn_ith(pair.head, 0);
        drafts.push_back(pair.likeliest(0));
        state.assign(own, own + pair.own);
    }
    drafts.erase(drafts.begin());
    return drafts;
}

static std::vector<llama_token> block(
    const Pair & pair, const std::vector<llama_token> & text, llama_token last, int count, llama_token mask) {
    const std::vector<float> read = pair.read(text);
    const size_t size = read.size() / text.size();
    Batch context(pair.head), batch(pair.head);
    for (size_t place = 0; place < text.size(); ++place) {
        context.add(-1, &read[place * size], size, (llama_pos) place, false);
    }
    context.run(LLAMA_PROCESS_TYPE_DECODE);
    for (int place = 0; place <= count; ++place) {
        batch.add(place ? mask : last, nullptr, 0, (llama_pos) text.size() + place, true);
    }
    batch.run(LLAMA_PROCESS_TYPE_DECODE);
    std::vector<llama_token> drafts;
    for (int place = 1; place <= count; ++place) {
        drafts.push_back(pair.likeliest(place));
    }
    return drafts;
}

int main(int given, char ** arguments) {
    check(given == 5, "llama_drafts MODEL HEAD COUNT MASK");
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_CONT) {
            fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();
    const int count = atoi(arguments[3]);
    llama_model * model = llama_model_load_from_file(arguments[1], llama_model_default_params());
    llama_model * drafter = llama_model_load_from_file(arguments[2], llama_model_default_params());
    check(model && drafter, "a file was not read");
    llama_context_params options = llama_context_default_params();
    options.n_ctx = options.n_batch = options.n_ubatch = 512;
    options.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    options.type_k = options.type_v = GGML_TYPE_F32;
    Pair pair = {llama_init_from_model(model, options), nullptr, llama_model_n_layer(model),
                 llama_vocab_n_tokens(llama_model_get_vocab(model)), (size_t) llama_model_n_embd(model),
                 (size_t) llama_model_n_embd(drafter)};
    options.ctx_other = pair.target;
    pair.head = llama_init_from_model(drafter, options);
    check(pair.target && pair.head, "a context was not made");
    for (uint32_t part = 0; part < llama_model_target_layer_ids_n(drafter); ++part) {
        const int layer = llama_model_target_layer_ids(drafter)[part];
        if (layer < pair.layers) {
            llama_set_embeddings_layer_inp(pair.target, layer, true);
        } else {
            llama_set_embeddings_nextn(pair.target, true, false);
        }
    }
    char kind[64] = {}, causal[8] = {};
    llama_model_meta_val_str(drafter, "general.architecture", kind, sizeof(kind));
    const bool blocks = std::string(kind) == "dflash";
    llama_set_embeddings_nextn(pair.head, true, true);
    if (blocks) {
        llama_model_meta_val_str(drafter, "dflash.attention.causal", causal, sizeof(causal));
        llama_set_causal_attn(pair.head, std::string(causal) == "true");
    }
    int length;
    while (scanf("%d", &length) == 1) {
        std::vector<llama_token> text(length);
        for (llama_token & token : text) {
            check(scanf("%d", &token) == 1, "a text is too short");
        }
        const llama_token last = text.back();
        text.pop_back();
        for (llama_context * context : {pair.target, pair.head}) {
            llama_memory_clear(llama_get_memory(context), true);
        }
        const auto drafts = blocks ? block(pair, text, last, count, atoi(arguments[4])) : eagle(pair, text, last, count);
        for (const llama_token draft : drafts) {
            printf("%d ", draft);
        }
        printf("\n");
    }
}
