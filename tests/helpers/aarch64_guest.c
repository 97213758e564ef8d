// Calls kernels of a library as XLA would, in a process of its own: one request after another comes over stdin, and its
// results go to stdout. tests/helpers/aarch64.py is the other side; it runs this under an emulator of the processor.
//
// Each buffer ends at a page that must not be touched, as in tests/kernels/guard_pages.c, so an access after it ends
// the process. The layouts are those of xla/ffi/api/c_api.h, as far as kernels read them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096ul
#define ALIGNED 64ul  // as XLA's buffers
#define MOST 4096     // buffers of a call
#define AXES 8

typedef int64_t (*Handler)(void *frame);
typedef int64_t (*Task)(void *data);

struct Buffer { int64_t size, extension, dtype; void *data; int64_t rank; int64_t *dims; };
struct Frame {
  int64_t size, extension; void *api, *context; int64_t stage;
  int64_t args_size, args_extension, args; void *args_types; struct Buffer **operands;
  int64_t rets_size, rets_extension, rets; void *rets_types; struct Buffer **results;
  int64_t attributes[8];
};
struct Schedule { int64_t size, extension; void *context; Task task; void *data; };
struct Threads { int64_t size, extension; void *context; int64_t *count; };
struct Job { Task task; void *data; };

static int64_t threads = 2;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int64_t running;

static void end(const char *why) {
  fprintf(stderr, "guest: %s (%s)\n", why, errno ? strerror(errno) : "no system error");
  _exit(3);
}

static void *run_task(void *memory) {
  struct Job job = *(struct Job *)memory;
  free(memory);
  job.task(job.data);
  pthread_mutex_lock(&lock);
  running--;
  pthread_cond_signal(&changed);
  pthread_mutex_unlock(&lock);
  return NULL;
}

static int64_t schedule(struct Schedule *call) {
  struct Job *job = malloc(sizeof *job);
  *job = (struct Job){call->task, call->data};
  pthread_mutex_lock(&lock);
  running++;
  pthread_mutex_unlock(&lock);
  pthread_t thread;
  if (pthread_create(&thread, NULL, run_task, job)) end("a thread can't be started");
  pthread_detach(thread);
  return 0;
}

static int64_t count_threads(struct Threads *call) {
  *call->count = threads;
  return 0;
}

static void take(void *target, size_t size) {
  for (size_t got = 0; got < size;) {
    ssize_t now = read(0, (char *)target + got, size - got);
    if (now == 0) _exit(0);  // no more requests
    if (now < 0 && errno != EINTR) end("read");
    got += now > 0 ? (size_t)now : 0;
  }
}

static void give(const void *source, size_t size) {
  for (size_t put = 0; put < size;) {
    ssize_t now = write(1, (const char *)source + put, size - put);
    if (now < 0 && errno != EINTR) end("write");
    put += now > 0 ? (size_t)now : 0;
  }
}

static int64_t number(void) {
  int64_t value;
  take(&value, sizeof value);
  return value;
}

static char *text(void) {
  size_t size = (size_t)number();
  char *value = calloc(1, size + 1);
  take(value, size);
  return value;
}

struct Guarded { char *base; size_t mapped; };

static void *guarded(size_t size, struct Guarded *region) {
  size_t inner = (size + PAGE - 1) / PAGE * PAGE;
  region->mapped = inner + 2 * PAGE;
  region->base = mmap(NULL, region->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (region->base == MAP_FAILED || (inner && mprotect(region->base + PAGE, inner, PROT_READ | PROT_WRITE)))
    end("no memory");
  return region->base + PAGE + (inner - size) / ALIGNED * ALIGNED;
}

static void call(Handler handler) {
  static struct Buffer buffers[MOST];
  static struct Buffer *operands[MOST], *results[MOST];
  static struct Guarded regions[MOST];
  static int64_t sizes[MOST], dims[MOST][AXES];
  int64_t taken = number(), given = number();
  if (taken + given > MOST) end("too many buffers");
  for (int64_t i = 0; i < taken + given; i++) {
    int64_t from = number(), rank = number();  // the operand whose memory a result takes, or -1
    if (rank > AXES) end("too many axes");
    take(dims[i], rank * sizeof *dims[i]);
    sizes[i] = number();
    regions[i] = (struct Guarded){0};
    void *data = from >= 0 ? buffers[from].data : guarded(sizes[i], &regions[i]);
    buffers[i] = (struct Buffer){sizeof(struct Buffer), 0, 0, data, rank, dims[i]};
    if (i < taken) take(data, sizes[i]);
    else if (from < 0) memset(data, 0xff, sizes[i]);  // NaN, unless the kernel writes it
    *(i < taken ? &operands[i] : &results[i - taken]) = &buffers[i];
  }
  void *api[32] = {0};
  api[17] = schedule, api[18] = count_threads;
  struct Frame frame = {.size = sizeof frame, .api = api, .context = api, .args = taken, .operands = operands};
  frame.rets = given, frame.results = results;
  int64_t failed = handler(&frame);
  pthread_mutex_lock(&lock);
  while (running) pthread_cond_wait(&changed, &lock);  // threads that came late use nothing but their own job
  pthread_mutex_unlock(&lock);
  if (failed) end("a kernel reported an error");
  for (int64_t i = taken; i < taken + given; i++) give(buffers[i].data, sizes[i]);
  for (int64_t i = 0; i < taken + given; i++)
    if (regions[i].base) munmap(regions[i].base, regions[i].mapped);
}

int main(int count, char **arguments) {
  void *library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
  if (!library) end(count == 2 ? dlerror() : "pass a library");
  int64_t *entries = dlsym(library, "rekindle_entries");
  if (!entries) end(dlerror());
  for (;;) {
    int64_t request = number(), slot = number();
    if (request == 0) {  // a kernel's symbol, for its place in the table
      char *symbol = text();
      entries[slot] = (int64_t)dlsym(library, symbol);
      int64_t found = entries[slot] != 0;
      give(&found, sizeof found);
      free(symbol);
    } else {
      threads = request;
      call((Handler)entries[slot]);
    }
  }
}
