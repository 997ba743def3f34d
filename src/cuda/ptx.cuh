/* ptx.cuh - machine instructions without a CUDA C++ equivalent. Contains no logic. */
#pragma once

#include <cstdint>
#include <cuda_fp16.h>

namespace kvant
{

/* d += A (16 x 16, row major) * B (16 x 8, column major), fp16 in, fp32 accumulated. */
KVANT_INLINE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The same of 8 numbers in TF32, whose lower 13 bits are not read. */
KVANT_INLINE void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The same of bf16. */
KVANT_INLINE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* d += A (16 x 32 bytes, row major) * B (32 x 8 bytes, column major), each signed or not. */
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

/* Four 8 x 8 matrices of 16-bit numbers from shared memory, in the order of operands: lane l gives
 * the address of row l mod 8 of matrix l / 8, 16 bytes, and gets numbers 2 (l mod 4) and + 1 of row
 * l / 4; TRANSPOSED: rows 2 (l mod 4) and + 1 of column l / 4. Rows may lie at the same place. */
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

/* The other way round: m to shared memory, rows as load_matrices<false> has them. compute_90. */
KVANT_INLINE void store_matrices(const uint32_t (&m)[4], uint32_t row)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(row),
                 "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

/* The same of transposed matrices: numbers 2 (l mod 4) and + 1 of column l / 4. */
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

/* Within 2^-10 of tanh(x). */
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

/* What a kernel needs that launch_early began before the one before it in the stream has ended:
 * wait comes before the first access to memory that others write; begin_next lets the next kernel
 * begin, which then waits itself. */
KVANT_INLINE void wait_for_former()
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

/* 16 bytes into shared memory, later; zeros when they are not there. */
KVANT_INLINE void copy_or_clear(uint32_t to, const uint8_t *from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

/* The copies since the last call are a group. */
KVANT_INLINE void end_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until all groups but the last N are there, for this thread. */
template <int N> KVANT_INLINE void wait_for_copies()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* What this thread wrote to shared memory is there before bulk copies and wgmma that come later.
 * compute_90. */
KVANT_INLINE void order_writes()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The compiler moves other loads to where their result is used. */
KVANT_INLINE float load_here(const float *from)
{
    float x;
    asm volatile("ld.global.f32 %0,[%1];" : "=f"(x) : "l"(from));
    return x;
}

/* A line into the second-level cache. */
KVANT_INLINE void prefetch_line(const void *base, size_t at)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const uint8_t *>(base) + at));
}

KVANT_INLINE uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* From a table in shared memory that does not change: not volatile, and the address is whole. */
KVANT_INLINE uint32_t look_up_word(uint32_t address)
{
    uint32_t x;
    asm("ld.shared.u32 %0,[%1];" : "=r"(x) : "r"(address));
    return x;
}

KVANT_INLINE uint32_t look_up_half(uint32_t address)
{
    uint16_t x;
    asm("ld.shared.u16 %0,[%1];" : "=h"(x) : "r"(address));
    return x;
}

KVANT_INLINE uint2 look_up_two_words(uint32_t address)
{
    uint2 x;
    asm("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(x.x), "=r"(x.y) : "r"(address));
    return x;
}

/* To shared memory, without a branch. */
KVANT_INLINE void store_if(bool condition, uint32_t address, uint32_t x)
{
    asm volatile("{.reg .pred p;\nsetp.ne.u32 p,%0,0;\n@p st.shared.b32 [%1],%2;}" ::"r"(
                     (uint32_t)condition),
                 "r"(address), "r"(x)
                 : "memory");
}

/* The compiler keeps the pointer instead of computing it for each use. */
template <class T> KVANT_INLINE void keep(const T *&p)
{
    asm("" : "+l"(p));
}

/* Of a normal number. */
KVANT_INLINE float inverse_root(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

/* Until so many threads are there. */
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
