/* Preloaded into a process, makes CPUID describe a processor with AVX2 and FMA and nothing later; with KEEP_AVX_VNNI,
 * AVX-VNNI is left.
 *
 * The kernel lets the instruction fault (arch_prctl, ARCH_CPUID); the handler runs it and takes bits away. Threads and
 * forked processes inherit that, programs that are executed load this library anew. The instructions themselves still
 * work: code that uses one without asking is not stopped.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_CPUID 0x1012
#define HASWELL 0x306c3u /* family, model, stepping: compilers choose by them, too */
#define BIT(n) (1u << (n))

#ifndef KEEP_AVX_VNNI
#define KEEP_AVX_VNNI 0
#endif

static const unsigned avx512_b = BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31);
static const unsigned avx512_c = BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14);
static const unsigned gfni_vaes_c = BIT(8) | BIT(9) | BIT(10);
static const unsigned avx512_amx_d = BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25);

static int (*real_sigaction)(int, const struct sigaction *, struct sigaction *);
static struct sigaction others; /* what the program wants for real faults */

static void faulting(int on) { syscall(SYS_arch_prctl, ARCH_CPUID, on ? 0 : 1); }

static void handle(int number, siginfo_t *info, void *context)
{
    (void)number;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)registers[REG_RIP];
    if (info->si_code != SI_KERNEL || code[0] != 0x0f || code[1] != 0xa2) {
        real_sigaction(SIGSEGV, &others, NULL); /* happens again, and to whom it belongs */
        return;
    }
    unsigned leaf = (unsigned)registers[REG_RAX], part = (unsigned)registers[REG_RCX], a, b, c, d;
    faulting(0);
    __cpuid_count(leaf, part, a, b, c, d);
    faulting(1);
    if (leaf == 1)
        a = HASWELL;
    else if (leaf == 7 && part == 0) {
        b &= ~avx512_b;
        c &= ~(avx512_c | gfni_vaes_c);
        d &= ~avx512_amx_d;
    } else if (leaf == 7) { /* AVX-VNNI, AVX512_BF16, AVX10 and what came later */
        a = KEEP_AVX_VNNI && part == 1 ? a & BIT(4) : 0;
        b = c = d = 0;
    } else if (leaf >= 0x1d && leaf <= 0x24)
        a = b = c = d = 0; /* tiles, AVX10 */
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

int sigaction(int number, const struct sigaction *wanted, struct sigaction *before)
{
    if (number != SIGSEGV)
        return real_sigaction(number, wanted, before);
    if (before)
        *before = others;
    if (wanted)
        others = *wanted;
    return 0;
}

sighandler_t signal(int number, sighandler_t wanted)
{
    struct sigaction now = {.sa_handler = wanted, .sa_flags = SA_RESTART}, before;
    return sigaction(number, &now, &before) ? SIG_ERR : before.sa_handler;
}

__attribute__((constructor)) static void begin(void)
{
    real_sigaction = (int (*)(int, const struct sigaction *, struct sigaction *))dlsym(RTLD_NEXT, "sigaction");
    struct sigaction mine = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    real_sigaction(SIGSEGV, &mine, &others);
    faulting(1);
    if (errno && syscall(SYS_arch_prctl, 0x1011) != 0) {
        fprintf(stderr, "this processor or kernel cannot hide instructions: CPUID does not fault\n");
        _exit(1);
    }
}
