/* cpu.c - detects the CPU level.
 *
 * On x86 a level needs every feature of its bundle and an operating system that saves the wide
 * registers (XCR0). A hypervisor may report the features without XCR0. */
#include "cpu.h"

#include <stdbool.h>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

static uint64_t read_xcr0(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

#define BIT(word, n) ((word) >> (n) & 1u)

typedef struct features {
    bool avx2, avx2_vnni, avx512, avx512_vnni, avx512_vbmi;
} features;

static features detect(void)
{
    features has = { false, false, false, false, false };
    uint32_t a, b, c, d, a7, b7, c7, d7;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !BIT(c, 27)) /* OSXSAVE: xgetbv may be executed */
        return has;
    uint64_t xcr0 = read_xcr0();
    if ((xcr0 & 6) != 6 || !BIT(c, 12) || !BIT(c, 29)) /* xmm and ymm state, FMA, F16C */
        return has;
    if (!__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7) || !BIT(b7, 5)) /* AVX2 */
        return has;
    has.avx2 = true;
    has.avx2_vnni = a7 >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && BIT(a, 4);
    /* mask and zmm state; F, DQ, BW, VL */
    has.avx512 = (xcr0 & 0xe6) == 0xe6 && BIT(b7, 16) && BIT(b7, 17) && BIT(b7, 30) && BIT(b7, 31);
    has.avx512_vnni = has.avx512 && BIT(c7, 11);
    has.avx512_vbmi = has.avx512_vnni && BIT(c7, 1);
    return has;
}

bool kvant_cpu_has(kvant_cpu_level level)
{
    features has = detect();
    switch (level) {
    case KVANT_CPU_C: return true;
    case KVANT_CPU_AVX2: return has.avx2;
    case KVANT_CPU_AVX2_VNNI: return has.avx2_vnni;
    case KVANT_CPU_AVX512: return has.avx512;
    case KVANT_CPU_AVX512_VNNI: return has.avx512_vnni;
    case KVANT_CPU_AVX512_VBMI: return has.avx512_vbmi;
    default: return false;
    }
}
#elif defined(__aarch64__)
#include "os.h"

/* Every 64-bit ARM that runs an operating system has Advanced SIMD, and its calling convention
 * needs it. */
bool kvant_cpu_has(kvant_cpu_level level)
{
    switch (level) {
    case KVANT_CPU_C:
    case KVANT_CPU_NEON: return true;
    case KVANT_CPU_NEON_DOT: return kvant_os_has_arm_dot_product();
    default: return false;
    }
}
#else
bool kvant_cpu_has(kvant_cpu_level level)
{
    return level == KVANT_CPU_C;
}
#endif
