/* direct_codes.cuh - unpacks the codes of pages to numbers in registers. The families of direct.cuh
 * share it. */
#pragma once

#include "decode_planes.cuh"

namespace kvant
{

/* A lane's place in an operand: rows row and row + 8 of A, columns 2 pair and + 1. */
struct DirectLane {
    int lane, row, pair;

    KVANT_INLINE DirectLane(int lane_) : lane(lane_), row(lane_ >> 2), pair(lane_ & 3)
    {
    }

    /* The tile that a row reads at step `tile`. The words of four row tiles lie together, and rows
     * read the tiles in different orders, so that lanes read from different banks. */
    KVANT_INLINE int own_tile(int tile) const
    {
        return (tile & ~3) | (tile + (row >> 1) & 3);
    }
};

/* Spreads fields of 2^log bits, four in each half of a word, to nibbles. */
KVANT_INLINE uint32_t spread(int log, uint32_t x)
{
    if (log == 2)
        return x;
    if (log == 1) {
        x &= 0x00ff00ffu, x = (x | x << 4) & 0x0f0f0f0fu;
        return (x | x << 2) & 0x33333333u;
    }
    x &= 0x000f000fu, x = (x | x << 6) & 0x03030303u;
    return (x | x << 3) & 0x11111111u;
}

/* The codes of the four registers of operand (rt, ct) for lane `lane`: nibble q of each half.
 * head_dim is 16 TILES. */
template <int BITS, bool KEYS, int TILES>
KVANT_INLINE uint32_t nibbles(const uint32_t *words, int rt, int ct, int lane)
{
    uint32_t codes = 0;
    unrolled_for (int p = 0; p < planes_of(BITS); p++) {
        const int log = plane_log(BITS, p), shift = 2 - log, tile = ct & ((1 << shift) - 1);
        const uint32_t word = words[((KEYS ? 0 : 128 * (rt >> 2)) << log) +
                                    (32 * (ct >> shift) + lane) * 4 + (rt & 3)];
        codes |= spread(log, word >> (4 * tile << log)) << plane_shift(BITS, p);
        words += code_plane_words(log, KEYS, TILES);
    }
    return codes;
}

/* The levels of pairs of codes, as halves in shared memory. There are COPIES of each entry, so that
 * lanes use different banks. The offset of a pair is computed by a product of bytes whose upper
 * halves are codes. */
template <int BITS, int COPIES> struct PairBook {
    static constexpr int STRIDE = COPIES / 4, BYTES = 4 * COPIES << 2 * BITS;
    static_assert(STRIDE << BITS < 256, "factors are bytes");
    uint32_t at; /* offset of the lane's copy */

    KVANT_INLINE PairBook(const void *memory, int lane)
        : at(shared_address(memory) + 4 * (lane & (COPIES - 1)))
    {
    }

    /* Looks up the codes in bytes j and j + 2. */
    KVANT_INLINE uint32_t look_up(uint32_t bytes, int j) const
    {
        return look_up_word(__dp4a(bytes, (STRIDE | (uint32_t)STRIDE << BITS << 16) << 8 * j, at));
    }

    /* Computes the registers of an operand from nibbles. */
    KVANT_INLINE void operand(uint32_t codes, uint32_t (&a)[4]) const
    {
        const uint32_t even = codes << 4 & 0xf0f0f0f0u, odd = codes & 0xf0f0f0f0u;
        a[0] = look_up(even, 0), a[1] = look_up(odd, 0), a[2] = look_up(even, 1),
        a[3] = look_up(odd, 1);
    }

    KVANT_INLINE static void load(void *memory, const float *levels, int thread, int threads)
    {
#pragma unroll 4
        for (int i = thread; i < BYTES / 4; i += threads)
            static_cast<uint32_t *>(memory)[i] =
                pack_half2(__ldg(levels + (i / COPIES & ((1 << BITS) - 1))),
                           __ldg(levels + (i / COPIES >> BITS)));
    }
};

template <int COPIES> struct PairBook<0, COPIES> {
    static constexpr int BYTES = 0;

    KVANT_INLINE PairBook(const void *, int)
    {
    }

    KVANT_INLINE void operand(uint32_t, uint32_t (&a)[4]) const
    {
        a[0] = a[1] = a[2] = a[3] = 0;
    }

    KVANT_INLINE static void load(void *, const float *, int, int)
    {
    }
};

KVANT_INLINE float stored_half(const uint8_t *page, int byte, int at)
{
    return __half2float(__ushort_as_half(reinterpret_cast<const uint16_t *>(page + byte)[at]));
}

/* The functions of most families: pages are copied without change, and no rotation has to be
 * applied. */
struct DirectFamily {
    static constexpr int ROW_BYTES = 0; /* bytes of raw rows, which may be copied one by one */

    __host__ __device__ static int stage_bytes(uint32_t page_bytes)
    {
        return (int)(page_bytes + 15) / 16 * 16;
    }

    /* Copies part `part` of a page, of which `tokens` exist. */
    KVANT_INLINE static void copy(uint32_t to, const uint8_t *page, uint32_t bytes, int part,
                                  int tokens, int lane)
    {
        (void)part, (void)tokens;
#pragma unroll 4
        for (uint32_t at = 16 * lane; at < bytes; at += 16 * 32)
            copy_or_clear(to + at, page + at, true);
    }

    /* prepare makes further forms of the block's queries; turn_back rotates row n of the results
     * back. */
    template <class A> KVANT_INLINE static void prepare(A &)
    {
    }

    template <class A> KVANT_INLINE static void turn_back(A &, int)
    {
    }

    /* The column tile whose channels are in the lane's row of sums i. */
    KVANT_INLINE static int tile_of(const DirectLane &, int i)
    {
        return i;
    }
};

/* x[k] of an array in registers, for an index that is no constant. */
template <class T, int N> KVANT_INLINE T element(const T (&x)[N], int k)
{
    T found = x[0];
    unrolled_for (int i = 1; i < N; i++)
        found = i == k ? x[i] : found;
    return found;
}

template <class T, int N> KVANT_INLINE void put_element(T (&x)[N], int k, const T &own)
{
    unrolled_for (int i = 0; i < N; i++)
        x[i] = i == k ? own : x[i];
}

/* Sets the rows x[k]. */
template <int N, int M> KVANT_INLINE void put_row(float (&x)[N][M], int k, const float (&own)[M])
{
    unrolled_for (int i = 0; i < N; i++)
        unrolled_for (int j = 0; j < M; j++)
            x[i][j] = i == k ? own[j] : x[i][j];
}

/* The sums of a family whose channels keep their places. TILES: tiles of 16 channels. */
template <int TILES> struct DirectSums : DirectFamily {
    float o[TILES][4];

    KVANT_INLINE DirectSums() : o{}
    {
    }

    KVANT_INLINE void shrink(const float (&by)[2])
    {
        unrolled_for (int i = 0; i < TILES; i++)
            unrolled_for (int k = 0; k < 4; k++)
                o[i][k] *= by[k & 1];
    }

    KVANT_INLINE void add(int i, const float (&x)[4])
    {
        unrolled_for (int k = 0; k < 4; k++)
            o[i][k] += x[k];
    }

    /* Stores sums as [channel][8 rows] of family F. */
    template <class F> KVANT_INLINE void leave_as(const DirectLane &at, float *to) const
    {
        unrolled_for (int i = 0; i < TILES; i++)
            unrolled_for (int h = 0; h < 2; h++)
                *reinterpret_cast<float2 *>(
                    to + (16 * F::tile_of(at, i) + F::column(at.row + 8 * h)) * 8 + 2 * at.pair) =
                    make_float2(o[i][2 * h], o[i][2 * h + 1]);
    }
};

} // namespace kvant
