// Encodes a picture by llama.cpp: `mtmd MMPROJ WIDTH HEIGHT THREADS <pixels >rows`, both as float32; pixels are normed,
// line by line, and rows are one token after the other. See tests/models/vision/test_mtmd.py for how to build it.
#include "clip.h"
#include "clip-impl.h"
#include "clip-model.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

int main(int count, char ** arguments) {
    if (count < 5) {
        fprintf(stderr, "mtmd MMPROJ WIDTH HEIGHT THREADS\n");
        return 1;
    }
    clip_context_params params = {};
    params.flash_attn_type = CLIP_FLASH_ATTN_TYPE_DISABLED;
    params.image_min_tokens = params.image_max_tokens = -1;
    const clip_init_result opened = clip_init(arguments[1], params);
    if (!opened.ctx_v) {
        fprintf(stderr, "%s was not read\n", arguments[1]);
        return 1;
    }
    const int width = atoi(arguments[2]), height = atoi(arguments[3]), threads = atoi(arguments[4]);
    std::vector<float> pixels((size_t) width * height * 3), rows;
    if (fread(pixels.data(), sizeof(float), pixels.size(), stdin) != pixels.size()) {
        fprintf(stderr, "the picture has too few pixels\n");
        return 1;
    }
    clip_image_f32 picture;
    picture.set_size({width, height}, false, false);
    picture.cpy_buf(pixels);
    rows.resize((size_t) clip_n_mmproj_embd(opened.ctx_v) * clip_n_output_tokens(opened.ctx_v, &picture));
    const clock_t begin = clock();
    if (!clip_image_encode(opened.ctx_v, threads, &picture, rows)) {
        fprintf(stderr, "the picture was not encoded\n");
        return 1;
    }
    fprintf(stderr, "%.4f s of processor time\n", (double) (clock() - begin) / CLOCKS_PER_SEC);
    fwrite(rows.data(), sizeof(float), rows.size(), stdout);
    return 0;
}
