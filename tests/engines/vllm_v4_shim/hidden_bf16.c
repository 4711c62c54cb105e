/* Shows a program the AVX512-BF16 that its processor has and its hypervisor hides.
 *
 * vLLM's V4 kernels, and oneDNN in them, ask CPUID and refuse where the bit is missing. Where the
 * instructions work all the same, CPUID is made to fault (arch_prctl, Linux), and answered here
 * with the bit set. Preloaded by sitecustomize.py; it does nothing where there is nothing to show.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

enum { CPUID_FAULTS = 0x1012 /* ARCH_SET_CPUID */, BF16 = 1 << 5 /* leaf 7.1, EAX */ };

static struct sigaction others; /* what the program wants to happen at a segmentation fault */

static void cpuid(uint32_t leaf, uint32_t sub, uint32_t r[4]) {
  __asm__ volatile("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "a"(leaf), "c"(sub));
}

static void faulted(int number, siginfo_t *info, void *context) {
  greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
  const uint8_t *code = (const uint8_t *)regs[REG_RIP];
  if (info->si_code == SI_KERNEL && code[0] == 0x0f && code[1] == 0xa2) {
    uint32_t leaf = regs[REG_RAX], sub = regs[REG_RCX], r[4];
    syscall(SYS_arch_prctl, CPUID_FAULTS, 1);
    cpuid(leaf, sub, r);
    syscall(SYS_arch_prctl, CPUID_FAULTS, 0);
    if (leaf == 7 && sub == 0 && r[0] == 0) r[0] = 1; /* there is a leaf 7.1 */
    if (leaf == 7 && sub == 1) r[0] |= BF16;
    regs[REG_RAX] = r[0], regs[REG_RBX] = r[1], regs[REG_RCX] = r[2], regs[REG_RDX] = r[3];
    regs[REG_RIP] += 2;
  } else if (others.sa_flags & SA_SIGINFO) {
    others.sa_sigaction(number, info, context);
  } else if (others.sa_handler != SIG_DFL && others.sa_handler != SIG_IGN) {
    others.sa_handler(number);
  } else {
    struct { void *handler; unsigned long flags; void *restorer; uint64_t mask; } unhandled = {0};
    syscall(SYS_rt_sigaction, SIGSEGV, &unhandled, NULL, sizeof unhandled.mask);
  }
}

int sigaction(int number, const struct sigaction *wanted, struct sigaction *before) {
  static int (*real)(int, const struct sigaction *, struct sigaction *);
  if (!real) real = (int (*)(int, const struct sigaction *, struct sigaction *))dlsym(RTLD_NEXT, "sigaction");
  if (number != SIGSEGV || !wanted || wanted->sa_sigaction == faulted) return real(number, wanted, before);
  if (before) *before = others;
  others = *wanted;
  return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
  struct sigaction wanted = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
  return sigaction(number, &wanted, &before) ? SIG_ERR : before.sa_handler;
}

__attribute__((target("avx512f,avx512bf16"))) static void use_it(void) {
  __asm__ volatile("" ::"x"(_mm512_cvtneps_pbh(_mm512_set1_ps(1.5f))));
}

static int has_it(void) {
  int status = -1;
  pid_t child = fork();
  if (!child) use_it(), _exit(0);
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

__attribute__((constructor)) static void start(void) {
  uint32_t r[4];
  cpuid(7, 1, r);
  if (r[0] & BF16 || !has_it()) return;
  struct sigaction ours = {.sa_sigaction = faulted, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGSEGV, &ours, NULL);
  syscall(SYS_arch_prctl, CPUID_FAULTS, 0);
}
