// Calls machine code with the address of four words, as a function of Windows, in a process that Wine runs. The code
// lies in memory that was made executable after it was written, as `system/windows.py` makes it.
//
// In: the code's size (8 bytes), the code; then calls, 16 bytes each. Out: the 16 bytes after each call.
#include <windows.h>

typedef void (*Function)(unsigned *words);

static void end(const char *why) {
  DWORD written;
  WriteFile(GetStdHandle(STD_ERROR_HANDLE), why, lstrlenA(why), &written, NULL);
  ExitProcess(3);
}

static int take(void *target, size_t size) {
  for (size_t got = 0; got < size;) {
    DWORD now = 0;
    if (!ReadFile(GetStdHandle(STD_INPUT_HANDLE), (char *)target + got, (DWORD)(size - got), &now, NULL) || !now) return 0;
    got += now;
  }
  return 1;
}

void start(void) {
  unsigned long long size = 0;
  DWORD before;
  if (!take(&size, sizeof size)) end("no code\n");
  char *code = VirtualAlloc(NULL, size, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
  if (!code || !take(code, size) || !VirtualProtect(code, size, PAGE_EXECUTE_READ, &before)) end("no memory for code\n");
  for (unsigned words[4]; take(words, sizeof words);) {
    ((Function)code)(words);
    if (!WriteFile(GetStdHandle(STD_OUTPUT_HANDLE), words, sizeof words, &before, NULL)) end("nothing can be written\n");
  }
  ExitProcess(0);
}
