// Allocations whose last byte lies before a page that must not be touched (or, with GUARD_FRONT, whose first one lies
// after such a page). Preloaded, it makes of each access outside of an XLA buffer a segmentation fault.
//
// Only aligned allocations are guarded: these are XLA's buffers. The ends of sizes that the alignment does not divide
// leave a few bytes unguarded. Freed ones stay unmapped, so an access after the end of life faults, too.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define PAGE 4096ul
#define SLOTS (1u << 16)  // fewer live ones than half of vm.max_map_count; what does not fit is not guarded

struct Guarded {
  void *at, *base;
  size_t mapped, size;
};
static struct Guarded table[SLOTS];
static unsigned live;
static unsigned long served;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*free_of_libc)(void *);
static void *(*realloc_of_libc)(void *, size_t);
static int (*align_of_libc)(void **, size_t, size_t);

__attribute__((constructor)) static void find_libc(void) {
  free_of_libc = dlsym(RTLD_NEXT, "free");
  realloc_of_libc = dlsym(RTLD_NEXT, "realloc");
  align_of_libc = dlsym(RTLD_NEXT, "posix_memalign");
}

static unsigned slot_of(const void *at) { return (unsigned)(((uintptr_t)at >> 4) * 2654435761u) % SLOTS; }

static struct Guarded *find(const void *at) {  // with the lock; linear probing that never meets an end when full
  for (unsigned i = slot_of(at), seen = 0; seen < SLOTS && table[i].base; i = (i + 1) % SLOTS, seen++)
    if (table[i].at == at) return &table[i];
  return NULL;
}

static void *guarded(size_t alignment, size_t size) {
  size_t inner = (size + PAGE - 1) / PAGE * PAGE, mapped = inner + 2 * PAGE;
  if (size == 0 || alignment > PAGE || live > SLOTS / 4) return NULL;
  char *base = mmap(NULL, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return NULL;
  if (mprotect(base + PAGE, inner, PROT_READ | PROT_WRITE)) {
    munmap(base, mapped);
    return NULL;
  }
  char *at = base + PAGE;
  if (!getenv("GUARD_FRONT")) at += (inner - size) / alignment * alignment;
  pthread_mutex_lock(&lock);
  unsigned i = slot_of(at);
  while (table[i].base) i = (i + 1) % SLOTS;
  table[i] = (struct Guarded){at, base, mapped, size};
  live++, served++;
  pthread_mutex_unlock(&lock);
  return at;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
  void *at = guarded(alignment, size);
  if (!at) {
    if (!align_of_libc) find_libc();
    return align_of_libc(out, alignment, size);
  }
  *out = at;
  return 0;
}

void *aligned_alloc(size_t alignment, size_t size) {
  void *at = NULL;
  int failed = posix_memalign(&at, alignment < sizeof(void *) ? sizeof(void *) : alignment, size);
  if (failed) errno = failed;
  return at;
}

void *memalign(size_t alignment, size_t size) { return aligned_alloc(alignment, size); }

static int release(void *at) {  // whether it was one of ours
  struct Guarded gone = {0};
  pthread_mutex_lock(&lock);
  struct Guarded *found = live ? find(at) : NULL;
  if (found) {
    gone = *found;
    found->base = NULL;
    live--;
    // Entries after the hole must stay reachable from their own slots.
    for (unsigned hole = found - table, i = (hole + 1) % SLOTS; table[i].base; i = (i + 1) % SLOTS) {
      unsigned home = slot_of(table[i].at);
      if ((i - home) % SLOTS >= (i - hole) % SLOTS) {
        table[hole] = table[i];
        table[i].base = NULL;
        hole = i;
      }
    }
  }
  pthread_mutex_unlock(&lock);
  if (gone.base) munmap(gone.base, gone.mapped);
  return gone.base != NULL;
}

void free(void *at) {
  if (!at || release(at)) return;
  if (!free_of_libc) find_libc();
  free_of_libc(at);
}

void *realloc(void *at, size_t size) {
  if (!realloc_of_libc) find_libc();
  pthread_mutex_lock(&lock);
  struct Guarded *found = at && live ? find(at) : NULL;
  size_t had = found ? found->size : 0;
  pthread_mutex_unlock(&lock);
  if (!found) return realloc_of_libc(at, size);
  char *moved = malloc(size);
  if (!moved) return NULL;
  for (size_t i = 0; i < (had < size ? had : size); i++) moved[i] = ((char *)at)[i];
  free(at);
  return moved;
}

__attribute__((destructor)) static void report(void) {
  if (getenv("GUARD_REPORT")) fprintf(stderr, "guarded %lu allocations\n", served);
}
