/* attributes.h - the library's compiler extensions and assumptions about the machine. All other
 * files of it are plain C11. */
#pragma once

#include <stdint.h>

/* Pages and calibration files are little endian, and kvant reads them in place. */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvant is for little-endian machines: its pages are read in place"
#endif

/* KVANT_PREFETCH fetches into the second-level cache. A page has more lines than the first-level
 * cache has line buffers, so loads would wait for them. */
#if defined(__GNUC__)
#define KVANT_PRINTF(format_index, first_argument)                                                 \
    __attribute__((format(printf, format_index, first_argument)))
#define KVANT_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define KVANT_NOINLINE __attribute__((noinline))
#define KVANT_PREFETCH(address) __builtin_prefetch(address, 0, 2)
#else
#define KVANT_PRINTF(format_index, first_argument)
#define KVANT_UNLIKELY(x) (x)
#define KVANT_NOINLINE
#define KVANT_PREFETCH(address) ((void)(address))
#endif

/* A hint for the CPU in a loop that waits for another thread. */
#if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__))
#define KVANT_RELAX() __builtin_ia32_pause()
#elif defined(__GNUC__) && defined(__aarch64__)
#define KVANT_RELAX() __asm__ volatile("yield" ::: "memory")
#else
#define KVANT_RELAX() ((void)0)
#endif

/* KVANT_ON_BOTH marks functions that kernels on a GPU call, too. */
#if !defined(__CUDACC__)
#define KVANT_ON_BOTH
#endif

/* KVANT_INLINE marks functions that are always inlined. unrolled_for is a loop without a branch: of
 * at most 8 steps on CPUs, of any constant number of steps on GPUs. rolled_for keeps its branch,
 * where a compiler for GPUs would copy the body. With AddressSanitizer or UBSan loops are not
 * unrolled: checking every access of every copy takes GCC minutes and 1.4 GB per kernel file,
 * instead of 9 s. */
#if defined(__CUDACC__)
#define KVANT_ON_BOTH __host__ __device__
#define KVANT_INLINE __device__ __forceinline__
#define unrolled_for _Pragma("unroll") for
#define rolled_for _Pragma("unroll 1") for
#elif defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__)
#define KVANT_INLINE static inline __attribute__((always_inline))
#define unrolled_for _Pragma("GCC unroll 8") for
#else
#define KVANT_INLINE static inline
#define unrolled_for for
#endif
#ifndef rolled_for
#define rolled_for for
#endif

/* The index of the lowest set bit of x. x is not 0. */
KVANT_INLINE uint32_t kvant_lowest_bit(uint32_t x)
{
#if defined(__GNUC__) && !defined(__CUDACC__)
    return (uint32_t)__builtin_ctz(x);
#else
    uint32_t n = 0;
    while (!(x >> n & 1))
        n++;
    return n;
#endif
}

#define KVANT_RETURN_IF(condition, status)                                                         \
    do {                                                                                           \
        if (KVANT_UNLIKELY(condition))                                                             \
            return (status);                                                                       \
    } while (0)

#define KVANT_FORWARD(expression)                                                                  \
    do {                                                                                           \
        kvant_status forwarded_ = (expression);                                                    \
        if (KVANT_UNLIKELY(forwarded_ != KVANT_OK))                                                \
            return forwarded_;                                                                     \
    } while (0)
