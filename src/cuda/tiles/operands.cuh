/* operands.cuh - matrices of 16-bit numbers in shared memory, and two ways to multiply them: mma
 * and wgmma.
 *
 * Every matrix has rows of 64 numbers, which are 128 bytes. The index of a row's piece of 16 bytes
 * is combined with the row's number by an exclusive or. So ldmatrix has no bank conflicts, and
 * wgmma knows this order as its 128-byte swizzle. Wider matrices are several such blocks, one after
 * another. Keys have a row per token and blocks of 64 channels. Values have a row per channel and
 * one block, the 64 tokens of a page. So both products can use the second operand without
 * rearranging it.
 *
 * A warp holds 16 rows of the result in the order of mma.m16n8k16. Lane l has rows l / 4 and l / 4
 * + 8, and columns 8 j + 2 (l mod 4) and the next one. The result of wgmma has the same order, in
 * four warps of 16 rows. This file knows nothing of codes or softmax. */
#pragma once

#include "../layout.cuh"
#include "../ptx.cuh"

namespace kvant
{

constexpr int BLOCK_CHANNELS = 64, ROW_BYTES = 128;

/* The blocks of 64 channels in a row of D channels. */
template <int D> constexpr int CHANNEL_BLOCKS = (D + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;

template <int D> constexpr int KEY_TILE_BYTES = CHANNEL_BLOCKS<D> * PAGE_TOKENS * ROW_BYTES;
template <int D> constexpr int VALUE_TILE_BYTES = D * ROW_BYTES;

/* The byte offset of the number at (row, column) of a matrix whose blocks have `rows` rows. */
KVANT_INLINE uint32_t place_of(uint32_t rows, uint32_t row, uint32_t column)
{
    return column / 64 * rows * ROW_BYTES + row * ROW_BYTES + ((column % 64 / 8) ^ (row & 7)) * 16 +
           column % 8 * 2;
}

/* Rows that a warp multiplies at a time, and rows and warps of a warpgroup. */
constexpr int WARP_ROWS = 16, GROUP_ROWS = 64, GROUP_WARPS = 4, GROUP_THREADS = 128;

/* Products by mma.m16n8k16, for every GPU. */
struct WarpProducts {
    /* s = q K^T for 16 rows and 64 tokens. row: the warp's first row of queries. */
    template <int D>
    KVANT_INLINE static void scores(float (&s)[8][4], const uint8_t *queries, const uint8_t *keys,
                                    int row, int lane)
    {
        unrolled_for (int j = 0; j < 8; j++)
            s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0;
        unrolled_for (int k = 0; k < D / 32; k++) {
            uint32_t a[2][4];
            unrolled_for (int i = 0; i < 2; i++)
                load_matrices<false>(a[i],
                                     reinterpret_cast<const __half *>(
                                         queries + place_of(GROUP_ROWS, row + (lane & 15),
                                                            32 * k + 16 * i + 8 * (lane >> 4))));
            unrolled_for (int j = 0; j < 8; j++) {
                uint32_t b[4];
                load_matrices<false>(b, reinterpret_cast<const __half *>(
                                            keys + place_of(PAGE_TOKENS, 8 * j + (lane & 7),
                                                            32 * k + 8 * (lane >> 3))));
                mma(s[j], a[0], b[0], b[1]);
                mma(s[j], a[1], b[2], b[3]);
            }
        }
    }

    /* o += p V for 16 rows and D channels. */
    template <int D>
    KVANT_INLINE static void add(float (&o)[D / 8][4], uint32_t (&p)[4][4], const uint8_t *values,
                                 int lane)
    {
        unrolled_for (int k = 0; k < 2; k++)
            unrolled_for (int j = 0; j < D / 8; j++) {
                uint32_t b[4];
                load_matrices<false>(
                    b, reinterpret_cast<const __half *>(
                           values + place_of(0, 8 * j + (lane & 7), 32 * k + 8 * (lane >> 3))));
                mma(o[j], p[2 * k], b[0], b[1]);
                mma(o[j], p[2 * k + 1], b[2], b[3]);
            }
    }

    /* These functions enclose asynchronous products. Here products are not asynchronous, so they do
     * nothing. */
    KVANT_INLINE static void begin()
    {
    }
    template <int LEFT> KVANT_INLINE static void finish()
    {
    }
    template <class T> KVANT_INLINE static void hold(T &)
    {
    }

    /* Called before other threads may read what this thread wrote to a matrix. */
    KVANT_INLINE static void publish()
    {
    }

    /* Changes the number of registers per thread of a warpgroup to N: MORE than before, or
     * fewer. */
    template <int N, bool MORE> KVANT_INLINE static void registers()
    {
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Describes a matrix at an address for wgmma: swizzled rows of 128 bytes, eight of which take 1024
 * bytes. */
KVANT_INLINE uint64_t matrix_at(uint32_t address)
{
    return (uint64_t)(address >> 4 & 0x3fff) | 1ull << 16 | (uint64_t)(1024 >> 4) << 32 |
           1ull << 62;
}

/* d = a b [+ d], where d has 64 rows and 8 N columns. a is 64 x 16, in registers or given by its
 * descriptor. BY_COLUMNS: b has 64 columns in a row of 128 bytes; otherwise b has a row of 64
 * numbers for each of its columns. */
template <int N> using Columns = float (&)[N][4];

/* The sums of columns i, i + 1, ... as operands that are read and written. */
#define COLUMN(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define COLUMNS_4(d, i) COLUMN(d, i), COLUMN(d, i + 1), COLUMN(d, i + 2), COLUMN(d, i + 3)
#define COLUMNS_8(d, i) COLUMNS_4(d, i), COLUMNS_4(d, i + 4)
#define COLUMNS_16(d, i) COLUMNS_8(d, i), COLUMNS_8(d, i + 8)

template <int BY_COLUMNS = 0>
KVANT_INLINE void multiply(Columns<8> d, const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"
        "%23,%24,%25,%26,%27,%28,%29,%30,%31},{%32,%33,%34,%35},%36,p,1,1,%38;}"
        : COLUMNS_8(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(BY_COLUMNS));
}

KVANT_INLINE void multiply(Columns<8> d, uint64_t a, uint64_t b, int add)
{
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"
        "%23,%24,%25,%26,%27,%28,%29,%30,%31},%32,%33,p,1,1,0,0;}"
        : COLUMNS_8(d, 0)
        : "l"(a), "l"(b), "r"(add));
}

KVANT_INLINE void multiply(Columns<16> d, const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"
        "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,"
        "%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,"
        "%63},{%64,%65,%66,%67},%68,p,1,1,0;}"
        : COLUMNS_16(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

template <int BY_COLUMNS = 0>
KVANT_INLINE void multiply(Columns<4> d, const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},{%16,%17,%18,%19},%20,p,1,1,%22;}"
        : COLUMNS_4(d, 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(BY_COLUMNS));
}

/* Products by wgmma, for four warps together; code for sm_90a. */
struct GroupProducts {
    /* Begins s = q K^T. Queries stay in shared memory, because registers are needed for sums. */
    template <int D>
    KVANT_INLINE static void scores(float (&s)[8][4], const uint8_t *queries, const uint8_t *keys,
                                    int, int)
    {
        const uint64_t q = matrix_at(shared_address(queries)), at = matrix_at(shared_address(keys));
        static_assert(GROUP_ROWS == PAGE_TOKENS, "blocks of queries and of keys are of one size");
        unrolled_for (int k = 0; k < D / 16; k++) {
            const int distance = (k / 4 * GROUP_ROWS * ROW_BYTES + k % 4 * 32) >> 4;
            multiply(s, q + distance, at + distance, k > 0);
        }
        commit();
    }

    /* Begins o += p V. */
    template <int D>
    KVANT_INLINE static void add(float (&o)[D / 8][4], uint32_t (&p)[4][4], const uint8_t *values,
                                 int)
    {
        const uint64_t at = matrix_at(shared_address(values));
        unrolled_for (int k = 0; k < 4; k++) {
            unrolled_for (int c = 0; c < D / 128; c++)
                multiply(reinterpret_cast<float(&)[16][4]>(o[16 * c]), p[k],
                         at + ((c * 128 * ROW_BYTES + 32 * k) >> 4), 1);
            constexpr int DONE = D / 128 * 128;
            if constexpr (D % 128 >= 64)
                multiply(reinterpret_cast<float(&)[8][4]>(o[DONE / 8]), p[k],
                         at + ((DONE * ROW_BYTES + 32 * k) >> 4), 1);
            if constexpr (D % 64 != 0)
                multiply(reinterpret_cast<float(&)[4][4]>(o[D / 64 * 8]), p[k],
                         at + ((D / 64 * 64 * ROW_BYTES + 32 * k) >> 4), 1);
        }
        commit();
    }

    KVANT_INLINE static void begin()
    {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    }
    KVANT_INLINE static void commit()
    {
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
    /* Waits until at most LEFT groups of products are still running. */
    template <int LEFT> KVANT_INLINE static void finish()
    {
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    }

    /* Makes the compiler compute these numbers before this point and use them only after it,
     * because it does not know that wgmma reads and writes registers later. */
    template <int N> KVANT_INLINE static void hold(float (&x)[N][4])
    {
        unrolled_for (int i = 0; i < N; i++)
            asm volatile("" : COLUMN(x, i)::"memory");
    }
    KVANT_INLINE static void hold(uint32_t (&x)[4][4])
    {
        unrolled_for (int i = 0; i < 4; i++)
            asm volatile("" : "+r"(x[i][0]), "+r"(x[i][1]), "+r"(x[i][2]), "+r"(x[i][3])::"memory");
    }

    KVANT_INLINE static void publish()
    {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }

    template <int N, bool MORE> KVANT_INLINE static void registers()
    {
        if (MORE)
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
        else
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
    }
};

#endif

/* The products for the GPU that the code is compiled for. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
using Products = GroupProducts;
#else
using Products = WarpProducts;
#endif

} // namespace kvant
