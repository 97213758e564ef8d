/* Preloaded into a process (LD_PRELOAD), sees every call that changes files below one folder: counts them, ends the
   process with SIGKILL at the n-th, has all from the n-th on fail, or writes each with its data to a log.
   helpers/disk_calls.py tells it what to do and reads the log.

   A record of the log: kind (1 byte), offset (8), lengths of path, second path and data (4, 4, 8), then these three. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define PATHS 4096

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char root[PATHS];
static int log_file = -1;
static long last_call, count; /* 0: there is no last one */
static int halves;            /* half of the data of the last write arrives */
static int failure;           /* errno of that call and those after it; 0: the process ends */

void disk_calls_watch(const char *folder, int log, long at, int half, int error) {
  pthread_mutex_lock(&lock);
  snprintf(root, sizeof root, "%s", folder);
  log_file = log, last_call = at, halves = half, failure = error, count = 0;
  pthread_mutex_unlock(&lock);
}

long disk_calls_count(void) { return count; }

static void put(const void *data, size_t size) {
  const char *at = data;
  while (size) {
    long done = syscall(SYS_write, log_file, at, size);
    if (done <= 0) _exit(97);
    at += done, size -= done;
  }
}

static void record(char kind, const char *path, const char *second, int64_t offset, const void *data, uint64_t size) {
  if (log_file < 0) return;
  uint32_t lengths[2] = {(uint32_t)strlen(path), (uint32_t)strlen(second)};
  put(&kind, 1), put(&offset, 8), put(lengths, 8), put(&size, 8);
  put(path, lengths[0]), put(second, lengths[1]), put(data, size);
}

/* What the test says of its own, such as a save that has returned. */
void disk_calls_mark(const char *text) {
  pthread_mutex_lock(&lock);
  record('!', text, "", 0, "", 0);
  pthread_mutex_unlock(&lock);
}

static int below(const char *path) {
  size_t length = strlen(root);
  return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int of_file(int file, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, PATHS - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return below(path);
}

static int of_path(int folder, const char *name, char *path) {
  if (!*root || !name) return 0;
  if (name[0] == '/') {
    snprintf(path, PATHS, "%s", name);
  } else {
    char at[PATHS];
    if (folder == AT_FDCWD ? !getcwd(at, sizeof at) : !of_file(folder, at)) return 0;
    if (snprintf(path, PATHS, "%s/%s", at, name) >= PATHS) return 0;
  }
  size_t length = strlen(path);
  while (length > 1 && path[length - 1] == '/') path[--length] = 0;
  return below(path);
}

static int is_last(void) { return ++count == last_call || (failure && last_call && count > last_call); }
static int end(void) { /* before the call is made */
  if (failure) {
    pthread_mutex_unlock(&lock);
    errno = failure;
    return -1;
  }
  kill(getpid(), SIGKILL);
  for (;;) pause();
}
#define BEFORE \
  if (is_last()) return end();

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* open: a file that is made, or cut to nothing */
static int opened(int (*call)(int, const char *, int, mode_t), int folder, const char *name, int flags, mode_t mode) {
  char path[PATHS];
  int changes = flags & (O_CREAT | O_TRUNC);
  if (!changes || (flags & O_TMPFILE) == O_TMPFILE || !of_path(folder, name, path)) return call(folder, name, flags, mode);
  pthread_mutex_lock(&lock);
  struct stat status;
  int error = errno, there = !lstat(path, &status);
  errno = error;
  if (!there || flags & O_TRUNC) BEFORE
  int file = call(folder, name, flags, mode);
  if (file >= 0 && !there) record('c', path, "", 0, "", 0);
  else if (file >= 0 && flags & O_TRUNC) record('t', path, "", 0, "", 0);
  pthread_mutex_unlock(&lock);
  return file;
}
static int call_openat(int folder, const char *name, int flags, mode_t mode) {
  return syscall(SYS_openat, folder, name, flags, mode);
}
#define MODE(flags) \
  mode_t mode = 0; \
  if (flags & (O_CREAT | __O_TMPFILE)) { \
    va_list list; \
    va_start(list, flags); \
    mode = va_arg(list, mode_t); \
    va_end(list); \
  }
int open(const char *name, int flags, ...) { MODE(flags) return opened(call_openat, AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened(call_openat, AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) return opened(call_openat, folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) return opened(call_openat, folder, name, flags | O_LARGEFILE, mode); }
int creat(const char *name, mode_t mode) { return opened(call_openat, AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* write, and all that does the same */
static ssize_t written(int file, const void *data, size_t size, off_t offset, int at_offset) {
  char path[PATHS];
  if (!*root || !of_file(file, path))
    return at_offset ? syscall(SYS_pwrite64, file, data, size, offset) : syscall(SYS_write, file, data, size);
  pthread_mutex_lock(&lock);
  if (is_last()) {
    if (halves && !failure) at_offset ? syscall(SYS_pwrite64, file, data, size / 2, offset) : syscall(SYS_write, file, data, size / 2);
    return end();
  }
  ssize_t done = at_offset ? syscall(SYS_pwrite64, file, data, size, offset) : syscall(SYS_write, file, data, size);
  if (done > 0) record('w', path, "", at_offset ? offset : lseek(file, 0, SEEK_CUR) - done, data, done);
  pthread_mutex_unlock(&lock);
  return done;
}
ssize_t write(int file, const void *data, size_t size) { return written(file, data, size, 0, 0); }
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) { return written(file, data, size, offset, 1); }
ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) { return written(file, data, size, offset, 1); }
static ssize_t written_parts(int file, const struct iovec *parts, int number, off_t offset, int at_offset) {
  ssize_t total = 0;
  for (int i = 0; i < number; i++) {
    ssize_t done = written(file, parts[i].iov_base, parts[i].iov_len, offset + total, at_offset);
    if (done < 0) return total ? total : done;
    total += done;
    if ((size_t)done < parts[i].iov_len) break;
  }
  return total;
}
#define PARTS(name, otherwise, offset, at_offset) \
  char path[PATHS]; \
  if (!*root || !of_file(file, path)) { \
    REAL(name); \
    return otherwise; \
  } \
  return written_parts(file, parts, number, offset, at_offset);
ssize_t writev(int file, const struct iovec *parts, int number) { PARTS(writev, real(file, parts, number), 0, 0) }
ssize_t pwritev(int file, const struct iovec *parts, int number, off_t offset) {
  PARTS(pwritev, real(file, parts, number, offset), offset, 1)
}
ssize_t pwritev64(int file, const struct iovec *parts, int number, off64_t offset) {
  PARTS(pwritev64, real(file, parts, number, offset), offset, 1)
}
/* Callers that are refused these write instead. */
ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
  char path[PATHS];
  if (*root && of_file(out, path)) return errno = EINVAL, -1;
  return syscall(SYS_sendfile, out, in, offset, size);
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) { return sendfile(out, in, offset, size); }
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
  char path[PATHS];
  if (*root && of_file(out, path)) return errno = EXDEV, -1;
  return syscall(SYS_copy_file_range, in, from, out, to, size, flags);
}

/* sync; only said, since no power fails */
static int synced(int file, int number) {
  char path[PATHS];
  if (!*root || !of_file(file, path)) return syscall(number, file);
  pthread_mutex_lock(&lock);
  BEFORE
  record('f', path, "", 0, "", 0);
  pthread_mutex_unlock(&lock);
  return 0;
}
int fsync(int file) { return synced(file, SYS_fsync); }
int fdatasync(int file) { return synced(file, SYS_fdatasync); }

/* truncate */
static int cut(int file, off_t size) {
  char path[PATHS];
  if (!*root || !of_file(file, path)) return syscall(SYS_ftruncate, file, size);
  pthread_mutex_lock(&lock);
  BEFORE
  int result = syscall(SYS_ftruncate, file, size);
  if (!result) record('t', path, "", size, "", 0);
  pthread_mutex_unlock(&lock);
  return result;
}
int ftruncate(int file, off_t size) { return cut(file, size); }
int ftruncate64(int file, off64_t size) { return cut(file, size); }

/* names */
#define ON_NAME(kind, folder, name, call) \
  char path[PATHS]; \
  if (!of_path(folder, name, path)) return call; \
  pthread_mutex_lock(&lock); \
  BEFORE \
  int result = call; \
  if (!result && kind) record(kind, path, "", 0, "", 0); \
  pthread_mutex_unlock(&lock); \
  return result;
int mkdirat(int folder, const char *name, mode_t mode) { ON_NAME('d', folder, name, syscall(SYS_mkdirat, folder, name, mode)) }
int mkdir(const char *name, mode_t mode) { ON_NAME('d', AT_FDCWD, name, syscall(SYS_mkdirat, AT_FDCWD, name, mode)) }
int unlinkat(int folder, const char *name, int flags) { ON_NAME('u', folder, name, syscall(SYS_unlinkat, folder, name, flags)) }
int unlink(const char *name) { ON_NAME('u', AT_FDCWD, name, syscall(SYS_unlinkat, AT_FDCWD, name, 0)) }
int rmdir(const char *name) { ON_NAME('u', AT_FDCWD, name, syscall(SYS_unlinkat, AT_FDCWD, name, AT_REMOVEDIR)) }
int fchmodat(int folder, const char *name, mode_t mode, int flags) {
  REAL(fchmodat);
  ON_NAME(0, folder, name, real(folder, name, mode, flags))
}
int chmod(const char *name, mode_t mode) {
  REAL(chmod);
  ON_NAME(0, AT_FDCWD, name, real(name, mode))
}
static int renamed(int from, const char *old, int to, const char *new, unsigned flags) {
  char path[PATHS], second[PATHS];
  int seen = of_path(from, old, path) & of_path(to, new, second);
  if (!seen) return syscall(SYS_renameat2, from, old, to, new, flags);
  pthread_mutex_lock(&lock);
  BEFORE
  int result = syscall(SYS_renameat2, from, old, to, new, flags);
  if (!result) record('r', path, second, 0, "", 0);
  pthread_mutex_unlock(&lock);
  return result;
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) { return renamed(from, old, to, new, flags); }
static int linked(int from, const char *old, int to, const char *new, int flags) {
  char path[PATHS], second[PATHS];
  int seen = of_path(from, old, path) & of_path(to, new, second);
  if (!seen) return syscall(SYS_linkat, from, old, to, new, flags);
  pthread_mutex_lock(&lock);
  BEFORE
  int result = syscall(SYS_linkat, from, old, to, new, flags);
  if (!result) record('l', path, second, 0, "", 0);
  pthread_mutex_unlock(&lock);
  return result;
}
int link(const char *old, const char *new) { return linked(AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int from, const char *old, int to, const char *new, int flags) { return linked(from, old, to, new, flags); }
