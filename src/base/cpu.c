/* cpu.c - CPU level detection. On x86 a level is used only when every feature of its bundle is there and the operating
 * system saves the wide registers (XCR0): a hypervisor may show the one without the other. */
#ifdef __APPLE__
#define _DARWIN_C_SOURCE /* sysctlbyname, which POSIX does not have */
#endif
#include "cpu.h"

#include <stdbool.h>
#include <stddef.h>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

static uint64_t read_xcr0(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

#define BIT(word, n) ((word) >> (n)&1u)

kvant_cpu_level kvant_cpu_detect(void)
{
    uint32_t a, b, c, d, b7, c7, d7;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !BIT(c, 27)) /* OSXSAVE: xgetbv may be executed */
        return KVANT_CPU_C;
    uint64_t xcr0 = read_xcr0();
    if ((xcr0 & 6) != 6 || !BIT(c, 12) || !BIT(c, 29)) /* xmm and ymm state, FMA, F16C */
        return KVANT_CPU_C;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7) || !BIT(b7, 5)) /* AVX2 */
        return KVANT_CPU_C;
    if ((xcr0 & 0xe6) != 0xe6 || !BIT(b7, 16) || !BIT(b7, 17) || !BIT(b7, 30) || !BIT(b7, 31))
        return KVANT_CPU_AVX2; /* mask and zmm state; F, DQ, BW, VL */
    return BIT(c7, 11) ? KVANT_CPU_AVX512_VNNI : KVANT_CPU_AVX512;
}
#elif defined(__aarch64__)
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>

static bool has_dot_product(void)
{
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
}
#elif defined(__APPLE__)
#include <sys/sysctl.h>

static bool has_dot_product(void)
{
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, NULL, 0) == 0 && has;
}
#else
static bool has_dot_product(void)
{
    return false;
}
#endif

/* Every 64-bit ARM that runs an operating system has Advanced SIMD, and its calling convention needs it. */
kvant_cpu_level kvant_cpu_detect(void)
{
    return has_dot_product() ? KVANT_CPU_NEON_DOT : KVANT_CPU_NEON;
}
#else
kvant_cpu_level kvant_cpu_detect(void)
{
    return KVANT_CPU_C;
}
#endif
