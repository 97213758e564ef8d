// Calls kernels of a DLL as XLA would on Windows, in a process of its own, which Wine runs: aarch64_guest.c's requests.
//
// Each buffer ends at a page that must not be touched, and each call must leave the registers as the calling convention
// of Windows says: xmm6 to xmm15, unlike on Linux, rsi and rdi too. Only functions of kernel32 and msvcrt are used, so no
// C library of a compiler's is linked. The layouts are those of xla/ffi/api/c_api.h, as far as kernels read them.
#include <windows.h>

#define PAGE 4096ull
#define ALIGNED 64ull  // as XLA's buffers
#define MOST 4096      // buffers of a call
#define AXES 8
#define SAVED 28       // words: ten registers of 16 bytes, and eight

typedef long long int64;
typedef int64 (*Function)(void *argument);

struct Buffer { int64 size, extension, dtype; void *data; int64 rank; int64 *dims; };
struct Frame {
  int64 size, extension; void *api, *context; int64 stage;
  int64 args_size, args_extension, args; void *args_types; struct Buffer **operands;
  int64 rets_size, rets_extension, rets; void *rets_types; struct Buffer **results;
  int64 attributes[8];
};
struct Schedule { int64 size, extension; void *context; Function task; void *data; };
struct Threads { int64 size, extension; void *context; int64 *count; };
struct Job { Function task; void *data; };
struct Registers { int64 before[SAVED], after[SAVED]; };

void *malloc(size_t);
void free(void *);

static int64 threads = 2;
static volatile LONG running;
static HANDLE input, output;

// calls_and_notes(function, argument, registers): with the registers `before`, whose state it notes in `after`.
int64 calls_and_notes(Function function, void *argument, struct Registers *registers);
__asm__(
    ".globl calls_and_notes\n"
    "calls_and_notes:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %rsi\n  pushq %rdi\n"
    "  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  subq $248, %rsp\n"
    "  movups %xmm6, 48(%rsp)\n  movups %xmm7, 64(%rsp)\n  movups %xmm8, 80(%rsp)\n  movups %xmm9, 96(%rsp)\n"
    "  movups %xmm10, 112(%rsp)\n  movups %xmm11, 128(%rsp)\n  movups %xmm12, 144(%rsp)\n"
    "  movups %xmm13, 160(%rsp)\n  movups %xmm14, 176(%rsp)\n  movups %xmm15, 192(%rsp)\n"
    "  movq %r8, 32(%rsp)\n"
    "  movups (%r8), %xmm6\n  movups 16(%r8), %xmm7\n  movups 32(%r8), %xmm8\n  movups 48(%r8), %xmm9\n"
    "  movups 64(%r8), %xmm10\n  movups 80(%r8), %xmm11\n  movups 96(%r8), %xmm12\n"
    "  movups 112(%r8), %xmm13\n  movups 128(%r8), %xmm14\n  movups 144(%r8), %xmm15\n"
    "  movq 160(%r8), %rbx\n  movq 168(%r8), %rsi\n  movq 176(%r8), %rdi\n  movq 184(%r8), %r12\n"
    "  movq 192(%r8), %r13\n  movq 200(%r8), %r14\n  movq 208(%r8), %r15\n  movq 216(%r8), %rbp\n"
    "  movq %rcx, %rax\n  movq %rdx, %rcx\n"
    "  callq *%rax\n"
    "  movq 32(%rsp), %r8\n"
    "  movups %xmm6, 224(%r8)\n  movups %xmm7, 240(%r8)\n  movups %xmm8, 256(%r8)\n  movups %xmm9, 272(%r8)\n"
    "  movups %xmm10, 288(%r8)\n  movups %xmm11, 304(%r8)\n  movups %xmm12, 320(%r8)\n"
    "  movups %xmm13, 336(%r8)\n  movups %xmm14, 352(%r8)\n  movups %xmm15, 368(%r8)\n"
    "  movq %rbx, 384(%r8)\n  movq %rsi, 392(%r8)\n  movq %rdi, 400(%r8)\n  movq %r12, 408(%r8)\n"
    "  movq %r13, 416(%r8)\n  movq %r14, 424(%r8)\n  movq %r15, 432(%r8)\n  movq %rbp, 440(%r8)\n"
    "  movups 48(%rsp), %xmm6\n  movups 64(%rsp), %xmm7\n  movups 80(%rsp), %xmm8\n  movups 96(%rsp), %xmm9\n"
    "  movups 112(%rsp), %xmm10\n  movups 128(%rsp), %xmm11\n  movups 144(%rsp), %xmm12\n"
    "  movups 160(%rsp), %xmm13\n  movups 176(%rsp), %xmm14\n  movups 192(%rsp), %xmm15\n"
    "  addq $248, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n"
    "  popq %rdi\n  popq %rsi\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");

static void end(const char *why) {
  DWORD written;
  WriteFile(GetStdHandle(STD_ERROR_HANDLE), why, lstrlenA(why), &written, NULL);
  ExitProcess(3);
}

static int64 checked(Function function, void *argument) {
  struct Registers registers;
  for (int i = 0; i < SAVED; i++) registers.before[i] = 0x0123456789abcdefll * (i + 1);
  int64 answer = calls_and_notes(function, argument, &registers);
  for (int i = 0; i < SAVED; i++)
    if (registers.before[i] != registers.after[i]) end("guest: a kernel changed a register that is its caller's\n");
  return answer;
}

static DWORD WINAPI run_task(void *memory) {
  struct Job job = *(struct Job *)memory;
  free(memory);
  checked(job.task, job.data);
  InterlockedDecrement(&running);
  return 0;
}

static int64 schedule(struct Schedule *call) {
  struct Job *job = malloc(sizeof *job);
  job->task = call->task, job->data = call->data;
  InterlockedIncrement(&running);
  HANDLE thread = CreateThread(NULL, 0, run_task, job, 0, NULL);
  if (!thread) end("guest: a thread can't be started\n");
  CloseHandle(thread);
  return 0;
}

static int64 count_threads(struct Threads *call) {
  *call->count = threads;
  return 0;
}

static void take(void *target, size_t size) {
  for (size_t got = 0; got < size;) {
    DWORD now = 0;
    if (!ReadFile(input, (char *)target + got, size - got < 65536 ? size - got : 65536, &now, NULL) || !now)
      ExitProcess(0);  // no more requests
    got += now;
  }
}

static void give(const void *source, size_t size) {
  for (size_t put = 0; put < size;) {
    DWORD now = 0;
    if (!WriteFile(output, (const char *)source + put, size - put < 65536 ? size - put : 65536, &now, NULL))
      end("guest: nothing can be written\n");
    put += now;
  }
}

static int64 number(void) {
  int64 value;
  take(&value, sizeof value);
  return value;
}

static void *guarded(size_t size, char **base) {
  size_t inner = (size + PAGE - 1) / PAGE * PAGE;
  DWORD before;
  *base = VirtualAlloc(NULL, inner + 2 * PAGE, MEM_RESERVE | MEM_COMMIT, PAGE_NOACCESS);
  if (!*base || (inner && !VirtualProtect(*base + PAGE, inner, PAGE_READWRITE, &before))) end("guest: no memory\n");
  return *base + PAGE + (inner - size) / ALIGNED * ALIGNED;
}

static struct Buffer buffers[MOST];
static struct Buffer *operands[MOST], *results[MOST];
static char *regions[MOST];
static int64 sizes[MOST], dims[MOST][AXES];
static void *api[32];
static struct Frame frame;

static void call(Function handler) {
  int64 taken = number(), given = number();
  if (taken + given > MOST) end("guest: too many buffers\n");
  for (int64 i = 0; i < taken + given; i++) {
    int64 from = number(), rank = number();  // the operand whose memory a result takes, or -1
    if (rank > AXES) end("guest: too many axes\n");
    take(dims[i], rank * sizeof *dims[i]);
    sizes[i] = number();
    regions[i] = NULL;
    buffers[i].size = sizeof(struct Buffer), buffers[i].rank = rank, buffers[i].dims = dims[i];
    buffers[i].data = from >= 0 ? buffers[from].data : guarded(sizes[i], &regions[i]);
    if (i < taken) take(buffers[i].data, sizes[i]);
    else if (from < 0) FillMemory(buffers[i].data, sizes[i], 0xff);  // NaN, unless the kernel writes it
    *(i < taken ? &operands[i] : &results[i - taken]) = &buffers[i];
  }
  api[17] = schedule, api[18] = count_threads;
  frame.size = sizeof frame, frame.api = api, frame.context = api;
  frame.args = taken, frame.operands = operands, frame.rets = given, frame.results = results;
  int64 failed = checked((Function)handler, &frame);
  while (running) SwitchToThread();  // threads that came late use nothing but their own job
  if (failed) end("guest: a kernel reported an error\n");
  for (int64 i = taken; i < taken + given; i++) give(buffers[i].data, sizes[i]);
  for (int64 i = 0; i < taken + given; i++)
    if (regions[i]) VirtualFree(regions[i], 0, MEM_RELEASE);
}

void start(void) {
  input = GetStdHandle(STD_INPUT_HANDLE), output = GetStdHandle(STD_OUTPUT_HANDLE);
  HMODULE library = LoadLibraryA("kernels-win32-x86_64.dll");  // from the program's own folder
  if (!library) end("guest: the DLL can't be loaded\n");
  int64 *entries = (int64 *)GetProcAddress(library, "rekindle_entries");
  if (!entries) end("guest: the DLL has no table of entries\n");
  for (;;) {
    int64 request = number(), slot = number();
    if (request == 0) {  // a kernel's symbol, for its place in the table
      size_t size = (size_t)number();
      char *symbol = malloc(size + 1);
      take(symbol, size);
      symbol[size] = 0;
      entries[slot] = (int64)GetProcAddress(library, symbol);
      int64 found = entries[slot] != 0;
      give(&found, sizeof found);
      free(symbol);
    } else {
      threads = request;
      call((Function)entries[slot]);
    }
  }
}
