/* ptx.cuh - machine instructions without a CUDA C++ equivalent. Contains no logic. A C++ program
 * that runs kernels defines KVANT_PTX and these functions (tests/cuda/threads). */
#ifndef KVANT_PTX
#define KVANT_PTX

#include <cstdint>
#include <cuda_fp16.h>

namespace kvant
{

/* d += A (16 x 16, row major) * B (16 x 8, column major). Operands are fp16, sums are fp32. */
KVANT_INLINE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* d += A (16 x 32 bytes, row major) * B (32 x 8 bytes, column major), with signed or unsigned
 * bytes. */
template <bool A_SIGNED, bool B_SIGNED>
KVANT_INLINE void mma_bytes(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
#define KVANT_MMA_BYTES(types)                                                                     \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." types                                             \
        ".s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"                                  \
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (A_SIGNED && B_SIGNED)
        KVANT_MMA_BYTES("s8.s8");
    else if constexpr (A_SIGNED)
        KVANT_MMA_BYTES("s8.u8");
    else if constexpr (B_SIGNED)
        KVANT_MMA_BYTES("u8.s8");
    else
        KVANT_MMA_BYTES("u8.u8");
#undef KVANT_MMA_BYTES
}

/* Transposes an 8 x 8 matrix of 16-bit numbers spread over the warp. */
KVANT_INLINE uint32_t transpose8x8(uint32_t x)
{
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(y) : "r"(x));
    return y;
}

/* Loads four 8 x 8 matrices of 16-bit numbers from shared memory, in the order of operands. Lane l
 * gives the address of row l mod 8 of matrix l / 8, which has 16 bytes. It gets numbers 2 (l mod 4)
 * and the next one of row l / 4. With TRANSPOSED it gets these rows of column l / 4. Rows may
 * overlap. */
template <bool TRANSPOSED> KVANT_INLINE void load_matrices(uint32_t (&m)[4], const __half *row)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(at)
                     : "memory");
}

/* Stores m to shared memory, with rows as in load_matrices<false>. compute_90. */
KVANT_INLINE void store_matrices(const uint32_t (&m)[4], uint32_t row)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(row),
                 "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

/* The same for transposed matrices: numbers 2 (l mod 4) and the next one of column l / 4. */
KVANT_INLINE void store_transposed(const uint32_t (&m)[4], uint32_t row)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(row),
                 "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

KVANT_INLINE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector)
{
    uint32_t d;
    asm("prmt.b32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

/* (a & mask) | (b & ~mask) */
template <uint32_t mask> KVANT_INLINE uint32_t bit_select(uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("lop3.b32 %0,%1,%2,%3,0xCA;" : "=r"(d) : "n"(mask), "r"(a), "r"(b));
    return d;
}

KVANT_INLINE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

KVANT_INLINE float log2_fast(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

/* tanh(x) with an error of at most 2^-10. */
KVANT_INLINE float tanh_approximately(float x)
{
    float y;
    asm("tanh.approx.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

/* fminf and fmaxf ignore a NaN; these pass it on. */
KVANT_INLINE float min_or_nan(float a, float b)
{
    float y;
    asm("min.NaN.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

KVANT_INLINE float max_or_nan(float a, float b)
{
    float y;
    asm("max.NaN.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

/* Atomically sets *counter = *counter < last ? *counter + 1 : 0 and returns the old value.
 * Orders the caller's memory accesses before and after it with the accesses of callers in other
 * thread blocks. */
KVANT_INLINE uint32_t count_up(uint32_t *counter, uint32_t last)
{
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0,[%1],%2;"
                 : "=r"(before)
                 : "l"(counter), "r"(last)
                 : "memory");
    return before;
}

/* For kernels that launch_early starts before the preceding kernel in the stream has ended. The
 * function wait_for_prior comes before the first access to memory that others write. The function
 * begin_next lets the next kernel begin. That kernel then waits itself. */
KVANT_INLINE void wait_for_prior()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

KVANT_INLINE void begin_next()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Copies 16 bytes to shared memory asynchronously; zeros if the bytes do not exist. */
KVANT_INLINE void copy_or_clear(uint32_t to, const uint8_t *from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

/* Makes the copies since the last call a group. */
KVANT_INLINE void end_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until all groups of this thread but the last N have been copied. */
template <int N> KVANT_INLINE void wait_for_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Loads at this point. The compiler moves other loads to where their result is used. */
KVANT_INLINE float load_here(const float *from)
{
    float x;
    asm volatile("ld.global.f32 %0,[%1];" : "=f"(x) : "l"(from));
    return x;
}

/* Prefetches a line to the second-level cache. */
KVANT_INLINE void prefetch_line(const void *base, size_t at)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t *>(base) + at));
}

KVANT_INLINE uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Reads from a table in shared memory that does not change: not volatile, and the address is
 * complete. */
KVANT_INLINE uint32_t look_up_word(uint32_t address)
{
    uint32_t x;
    asm("ld.shared.u32 %0,[%1];" : "=r"(x) : "r"(address));
    return x;
}

KVANT_INLINE uint2 look_up_two_words(uint32_t address)
{
    uint2 x;
    asm("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(x.x), "=r"(x.y) : "r"(address));
    return x;
}

/* Stores to shared memory without a branch. */
KVANT_INLINE void store_if(bool condition, uint32_t address, uint32_t x)
{
    asm volatile("{.reg .pred p;\nsetp.ne.u32 p,%0,0;\n@p st.shared.b32 [%1],%2;}" ::"r"(
                     (uint32_t)condition),
                 "r"(address), "r"(x)
                 : "memory");
}

/* Makes the compiler keep the pointer instead of computing it for each use. */
template <class T> KVANT_INLINE void keep(const T *&p)
{
    asm("" : "+l"(p));
}

/* The compiler does not put off loads of these numbers beyond this. */
KVANT_INLINE void hold(uint32_t &x)
{
    asm volatile("" : "+r"(x));
}
KVANT_INLINE void hold(size_t &x)
{
    asm volatile("" : "+l"(x));
}
KVANT_INLINE void hold(float &x)
{
    asm volatile("" : "+f"(x));
}

/* 1 / sqrt(x) of a normal number. */
KVANT_INLINE float inverse_root(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

/* Waits until `threads` threads have arrived. */
KVANT_INLINE void meet_at(int barrier, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

KVANT_INLINE uint32_t pack_half2(float low, float high)
{
    __half2 h = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&h);
}

} // namespace kvant

#endif
