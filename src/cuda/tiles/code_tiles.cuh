/* code_tiles.cuh - a page's codes as the first operand of wgmma. The operand has 64 rows, and each
 * warp of a warpgroup has 16 of them in registers. Rows are tokens for keys, and channels (in
 * blocks of 64) for values.
 *
 * A warp unpacks one row tile of every column tile. It computes the numbers that decode kernels
 * multiply (dequant.cuh), without the bias of codebooks. If the halves of a register are not
 * neighbouring columns (Order), rows of the second operand have the same order
 * (place_in_operand). */
#pragma once

#include "../attention/attention.cuh"
#include "../papers/unpack_chunks.cuh"
#include "unpack_trellis.cuh"

namespace kvant
{

/* The index in the operand of column 0 .. 63 of a kind's codes. */
template <Order ORDER> KVANT_INLINE int place_in_operand(int column)
{
    const int odd = column & 1, far = column >> 3 & 1, next = column >> 4 & 1;
    if constexpr (ORDER == Order::COLUMNS_AND_8)
        return (column & ~9) | far | odd << 3;
    if constexpr (ORDER == Order::TILES)
        return (column & ~17) | next | odd << 4;
    return column;
}

/* The same for a channel of keys. */
template <class C> KVANT_INLINE int place_of_channel(int channel)
{
    if constexpr (HAS_CHUNKS<C>) {
        const int chunk = channel / C::CHANNELS, number = channel % C::CHANNELS;
        return 16 * (chunk / 8 * 2 + chunk % 2) + chunk % 8 / 2 * 2 + number % 2 + number / 2 * 8;
    } else
        return (channel & ~63) | place_in_operand<C::ORDER>(channel & 63);
}

/* The channel at an index of the operand; D or more if there is none. */
template <class C, int D> KVANT_INLINE int channel_at(int place)
{
    if constexpr (HAS_CHUNKS<C>) {
        const int chunk = place / 32 * 8 + place % 8 / 2 * 2 + place / 16 % 2,
                  number = place % 2 + place % 16 / 8 * 2;
        return number < C::CHANNELS ? C::CHANNELS * chunk + number : D;
    } else /* exchanging two bits is its own inverse */
        return place_of_channel<C>(place);
}

/* ---- tables for unpacking ---- */

/* Codebooks: numbers without the bias. */
struct SignedBytes : Bytes {
    uint32_t minus_bias;
};

template <int COPIES> struct SignedTrellis : LevelTable<COPIES> {
    uint32_t minus_bias; /* for 4 bits */
};

template <class C> __host__ __device__ constexpr int channels_of()
{
    if constexpr (HAS_CHUNKS<C>)
        return C::CHANNELS;
    else
        return 1;
}
template <class C> constexpr int CHANNELS_OF = channels_of<C>();

template <class C, int D> __host__ __device__ constexpr int code_copies()
{
    if constexpr (HAS_CHUNKS<C>)
        return C::CHANNELS == 3 ? C::TILE_COPIES : C::template copies<true, D, 2>();
    else
        return level_copies<C, true>();
}

template <class C, int D> __host__ __device__ constexpr int code_table_bytes()
{
    if constexpr (HAS_CHUNKS<C>)
        return (C::ENTRIES * C::ENTRY_BYTES * code_copies<C, D>() + 127) / 128 * 128;
    else
        return level_bytes<C>(code_copies<C, D>());
}

template <class C, int D> KVANT_INLINE void fill_code_table(uint8_t *table, const TileCodec &codec)
{
    if constexpr (HAS_CHUNKS<C>)
        C::fill(table, codec.directions, code_copies<C, D>());
    else if constexpr (HAS_TRELLIS<C>)
        fill_levels<C, code_copies<C, D>()>(table, codec.params.bytes);
}

template <class C, int D>
using CodeTable = std::conditional_t<
    HAS_CHUNKS<C>, ChunkTable<code_copies<C, D>()>,
    std::conditional_t<HAS_TRELLIS<C>, SignedTrellis<code_copies<C, D>()>, SignedBytes>>;

template <class C, int D>
KVANT_INLINE CodeTable<C, D> code_table(const uint8_t *table, const TileCodec &codec, uint32_t one,
                                        int lane)
{
    if constexpr (HAS_CHUNKS<C>)
        return chunk_table<C, code_copies<C, D>()>(table, codec.directions, lane);
    else if constexpr (HAS_TRELLIS<C>)
        return CodeTable<C, D>{ level_table<C, code_copies<C, D>()>(table, one, lane),
                                twice(-codec.params.bias * (1 / UNIT)) };
    else
        return SignedBytes{ bytes_of(codec.params.bytes, one),
                            twice(-codec.params.bias * (1 / UNIT)) };
}

/* The row tile that a lane reads for row `row` of its warp. With T::ROTATED, rows 2 i and 2 i + 1
 * read the tile of the warp i places further. So the words of 32 lanes are in different banks. */
template <class T> KVANT_INLINE int row_tile_of(int warp, int row)
{
    return T::ROTATED ? (warp + row / 2) % 4 : warp;
}

/* ---- uniform codes and codebooks ---- */

/* The words of a warp for a step of C::TILES column tiles, in a block of 64 rows. */
template <class C, int ROWS, int COLUMNS>
KVANT_INLINE void tile_words(const uint32_t *page, int block, int step, int warp, int lane,
                             uint32_t (&w)[3])
{
    constexpr int UNITS2 = (COLUMNS + 1) / 2, UNITS1 = (COLUMNS + 3) / 4;
    auto word = [&](int plane, int units, int unit) {
        return page[plane + 128 * block * units + (32 * unit + lane) * 4 + warp];
    };
    if constexpr (C::BITS == 4 || C::BITS == 8)
        w[0] = word(0, COLUMNS, step);
    if constexpr (C::BITS == 8)
        w[1] = word(COLUMNS * 32 * ROWS, COLUMNS, step);
    if constexpr (C::BITS == 2)
        w[0] = word(0, UNITS2, step);
    if constexpr (C::BITS == 3) {
        w[0] = word(0, UNITS2, 2 * step);
        w[1] = word(0, UNITS2, 2 * step + 1);
        w[2] = word(UNITS2 * 32 * ROWS, UNITS1, step);
    }
}

KVANT_INLINE uint32_t add_halves(uint32_t a, uint32_t b)
{
    const __half2 y = __hadd2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b));
    return *reinterpret_cast<const uint32_t *>(&y);
}

/* Reads four column tiles from the given one on. */
template <class C, int ROWS, int COLUMNS>
KVANT_INLINE void code_tiles(const uint8_t *page, int block, int first, int warp, int lane,
                             const SignedBytes &table, uint32_t (&a)[4][4])
{
    unrolled_for (int i = 0; i < 4; i += C::TILES) {
        uint32_t w[3], x[C::TILES][4];
        tile_words<C, ROWS, COLUMNS>(reinterpret_cast<const uint32_t *>(page), block,
                                     (first + i) / C::TILES, warp, lane, w);
        C::unpack(w, table, x);
        unrolled_for (int t = 0; t < C::TILES; t++)
            unrolled_for (int k = 0; k < 4; k++)
                a[i + t][k] = C::BIASED ? add_halves(x[t][k], table.minus_bias) : x[t][k];
    }
}

/* ---- keys: part i has column tiles OPERANDS i to OPERANDS i + 3 ---- */

template <class C, int D, class = void> struct KeyOperands {
    static constexpr int OPERANDS = 4, PARTS = D / 64;
    static constexpr bool ROTATED = true;
    const uint8_t *page;
    int warp, lane;
    const SignedBytes &table;

    KVANT_INLINE void unpack(int part, uint32_t (&a)[4][4]) const
    {
        code_tiles<C, 4, D / 16>(page, 0, 4 * part, warp, lane, table, a);
    }
};

/* The words of a warp for four column tiles, and their trellis bits as a plane. With 4-bit codes
 * these are four words. With shorter codes these are two words of 2-bit fields, and for 3-bit codes
 * a word of third bits. */
template <class C> struct TrellisWords {
    static constexpr int WORDS = C::BITS == 4 ? 4 : 2;
    uint32_t w[4], third;

    /* from: the words of a unit of 32 lanes; thirds: the words of its third bits. */
    KVANT_INLINE void load(const uint32_t *from, const uint32_t *thirds, int warp, int lane)
    {
        unrolled_for (int i = 0; i < WORDS; i++)
            w[i] = from[(32 * i + lane) * 4 + warp];
        third = C::BITS == 3 ? thirds[lane * 4 + warp] : 0;
    }

    KVANT_INLINE uint32_t plane() const
    {
        return C::BITS == 4 ? low_plane(w) : even_bits(w[0], w[1]);
    }

    /* at(j): the plane of j steps earlier. */
    template <class At, class T>
    KVANT_INLINE void unpack(const At &at, const T &table, uint32_t (&a)[4][4]) const
    {
        auto keep = [&](int i, const uint32_t(&x)[4]) {
            unrolled_for (int k = 0; k < 4; k++)
                a[i][k] = C::BIASED ? add_halves(x[k], table.minus_bias) : x[k];
        };
        if constexpr (C::BITS == 4)
            pair_operands4(w, at, table, keep);
        else /* the second word's third bits are the upper bytes */
            pair_operands<C::BITS>(
                w[0], w[1], third, third >> 8, false, at, table,
                [&](int i, int t, const uint32_t(&x)[4]) { keep(2 * i + t, x); });
    }
};

/* Keys with trellis codes. The codes of j steps earlier are in the same plane or in the one before
 * it. */
template <class C, int D> struct KeyOperands<C, D, std::enable_if_t<HAS_TRELLIS<C>>> {
    static constexpr int OPERANDS = 4, PARTS = D / 64, WORDS = TrellisWords<C>::WORDS,
                         BEFORE = (TRELLIS_MEMORY + WORDS - 1) / WORDS;
    static constexpr bool ROTATED = true;
    using Table = CodeTable<C, D>;
    const Table &table;
    TrellisWords<C> words[PARTS];
    uint32_t plane[BEFORE + PARTS];

    KVANT_INLINE KeyOperands(const uint8_t *page, int warp, int lane, const Table &table_)
        : table(table_)
    {
        const uint32_t *from = reinterpret_cast<const uint32_t *>(page);
        unrolled_for (int g = 0; g < PARTS; g++) {
            words[g].load(from + 128 * WORDS * g, from + 128 * (WORDS * PARTS + g), warp, lane);
            plane[BEFORE + g] = words[g].plane();
        }
        unrolled_for (int g = BEFORE - 1; g >= 0; g--)
            plane[g] = key_fields_before<C::BITS>(plane[g + PARTS], lane);
    }

    KVANT_INLINE uint32_t steps_before(int part, int j) const
    {
        const int r = j % WORDS;
        const uint32_t own = plane[BEFORE + part - j / WORDS];
        if (r == 0)
            return own;
        const uint32_t before = plane[BEFORE + part - j / WORDS - 1], shifted = own << r,
                       left = before >> (WORDS - r);
        return WORDS == 2 ? bit_select<0xaaaaaaaau>(shifted, left)
               : r == 1   ? bit_select<0xeeeeeeeeu>(shifted, left)
               : r == 2   ? bit_select<0xccccccccu>(shifted, left)
                          : bit_select<0x88888888u>(shifted, left);
    }

    KVANT_INLINE void unpack(int part, uint32_t (&a)[4][4]) const
    {
        words[part].unpack([&](int j) { return steps_before(part, j); }, table, a);
    }
};

template <class C, int D> struct KeyOperands<C, D, std::enable_if_t<HAS_CHUNKS<C>>> {
    static constexpr int OPERANDS = 2, PARTS = ChunkPlaces<C, D>::KEY_STEPS;
    static constexpr bool ROTATED = false;
    const uint8_t *page;
    int warp, lane;
    const CodeTable<C, D> &table;

    KVANT_INLINE void unpack(int part, uint32_t (&a)[2][4]) const
    {
        C::template key_step<D>(page, lane, table, part, warp, a);
    }
};

/* ---- values: operand i of a part has one row block and a column tile. A part is a block or, for
 * chunks, two column tiles of all blocks ---- */

template <class V> __host__ __device__ constexpr int block_of(int part, int i)
{
    return V::CHUNKS ? i % V::BLOCKS : part;
}

template <class V> __host__ __device__ constexpr int column_tile_of(int part, int i)
{
    return V::CHUNKS ? 2 * part + i / V::BLOCKS : i;
}

template <class C, int D, class = void> struct ValueOperands {
    static constexpr int OPERANDS = 4, PARTS = D / 64, BLOCKS = D / 64;
    static constexpr bool CHUNKS = false, ROTATED = true;
    const uint8_t *page;
    int warp, lane;
    const SignedBytes &table;

    /* The channel of the lane's row, or with `far` of the row 8 below it. */
    KVANT_INLINE static int channel(int block, int far, int warp, int lane)
    {
        return 64 * block + 16 * warp + 8 * far + (lane >> 2);
    }

    KVANT_INLINE void unpack(int part, uint32_t (&a)[4][4]) const
    {
        code_tiles<C, D / 16, 4>(page, part, 0, warp, lane, table, a);
    }
};

/* Values with trellis codes. The row tiles of a warp have the same l (format.md). The run before
 * its first run is its own last run, one row earlier, or the last run of the warp before. */
template <class C, int D> struct ValueOperands<C, D, std::enable_if_t<HAS_TRELLIS<C>>> {
    static constexpr int OPERANDS = 4, PARTS = D / 64, BLOCKS = D / 64,
                         WORDS = TrellisWords<C>::WORDS;
    static constexpr bool CHUNKS = false, ROTATED = false;
    using Table = CodeTable<C, D>;
    const Table &table;
    int lane;
    TrellisWords<C> words[PARTS];
    uint32_t run[PARTS + 1]; /* run[0]: the run before the first */

    KVANT_INLINE static int channel(int block, int far, int warp, int lane)
    {
        return ValueOperands<Uniform4, D>::channel(block, far, warp, lane);
    }

    KVANT_INLINE ValueOperands(const uint8_t *page, int warp, int lane_, const Table &table_)
        : table(table_), lane(lane_)
    {
        const uint32_t *from = reinterpret_cast<const uint32_t *>(page);
        TrellisWords<C> other;
        unrolled_for (int g = 0; g < PARTS; g++) {
            words[g].load(from + 128 * WORDS * g, from + 128 * (WORDS * PARTS + g), warp, lane);
            run[g + 1] = words[g].plane();
        }
        other.load(from + 128 * WORDS * (PARTS - 1), from + 128 * WORDS * PARTS, (warp + 3) % 4,
                   lane);
        run[0] = WORDS == 4 ? bit_select<0xf0f0f0f0u>(run[PARTS] << 4, other.plane() >> 4)
                            : bit_select<0xccccccccu>(run[PARTS] << 2, other.plane() >> 2);
    }

    KVANT_INLINE void unpack(int part, uint32_t (&a)[4][4]) const
    {
        const TermsBefore terms(run[part + 1], run[part], lane);
        words[part].unpack([&](int j) { return terms.at[j]; }, table, a);
    }
};

/* Values of quaternions. Each warp has a group of chunks, as long as there are groups. */
template <class C, int D>
struct ValueOperands<C, D, std::enable_if_t<HAS_CHUNKS<C> && CHANNELS_OF<C> == 4>> {
    using P = ChunkPlaces<C, D>;
    static constexpr int BLOCKS = P::GROUP_TILES, OPERANDS = 2 * BLOCKS, PARTS = 2;
    static constexpr bool CHUNKS = true, ROTATED = false;
    const uint8_t *page;
    int warp, lane;
    const CodeTable<C, D> &table;

    KVANT_INLINE static int channel(int block, int far, int warp, int lane)
    {
        return value_channel<C, D>(BLOCKS * warp + block, lane >> 2, far);
    }

    KVANT_INLINE void unpack(int part, uint32_t (&a)[OPERANDS][4]) const
    {
        auto keep = [&](int tile, int ct, const uint32_t(&x)[4]) {
            unrolled_for (int k = 0; k < 4; k++)
                a[tile % BLOCKS + BLOCKS * (ct % 2)][k] = x[k];
        };
        if (warp >= P::VALUE_GROUPS) {
            unrolled_for (int i = 0; i < OPERANDS; i++)
                a[i][0] = a[i][1] = a[i][2] = a[i][3] = 0;
        } else /* computed as if the warp had the first group */
            unrolled_for (int i = 0; i < 2; i++)
                C::template value_step<D>(page + 4 * P::GROUP_CHUNKS * warp, lane, table, 0,
                                          2 * part + i, keep);
    }
};

/* Values of triplets: 8 rows are one coordinate of 8 chunks; the remaining rows are single channels
 * in order. A lane looks up two chunks. With 128 channels, the first chunk gives three of its four
 * rows. */
template <class C, int D>
struct ValueOperands<C, D, std::enable_if_t<HAS_CHUNKS<C> && CHANNELS_OF<C> == 3>> {
    static constexpr int BLOCKS = D / 64, OPERANDS = 2 * BLOCKS, PARTS = 2;
    static constexpr bool CHUNKS = true, ROTATED = false;
    using Places = ChunkPlaces<C, D>;
    using Four = typename C::Four;
    const uint8_t *page;
    int warp, lane;
    const CodeTable<C, D> &table;

    KVANT_INLINE static int channel(int block, int far, int warp, int lane)
    {
        const int row = lane >> 2, i = 2 * BLOCKS * warp + 2 * block + far;
        if constexpr (D == 128)
            return 2 * block + far < 3 ? 3 * (8 * warp + row) + 2 * block + far
                   : warp < 3          ? 3 * (32 + row) + warp
                                       : 120 + row;
        return i < 6 ? 3 * (8 * (i / 3) + row) + i % 3 : 8 * i + row;
    }

    /* A coordinate of two tokens. */
    KVANT_INLINE static uint32_t coordinate(const uint2 &x, const uint2 &y, int which)
    {
        return prmt(which == 2 ? x.y : x.x, which == 2 ? y.y : y.x, which == 1 ? 0x7632 : 0x5410);
    }

    KVANT_INLINE void unpack(int part, uint32_t (&a)[OPERANDS][4]) const
    {
        const int first = channel(0, 0, warp, lane), last = channel(BLOCKS - 1, 1, warp, lane);
        unrolled_for (int which = 0; which < 2; which++)
            unrolled_for (int h = 0; h < 2; h++) {
                uint32_t w[3];
                C::template value_words<Places>(reinterpret_cast<const uint32_t *>(page),
                                                (which ? last : first) / 3, lane & 3, h, part, w);
                const Four codes(w, table);
                unrolled_for (int i = 0; i < 2; i++) {
                    const uint2 x = codes.look_up(table, i), y = codes.look_up(table, i + 2);
                    const uint32_t norm = codes.norm(i, i + 2);
                    auto scaled = [&](int coordinate_) {
                        const uint32_t pair = coordinate(x, y, coordinate_);
                        return C::HAS_NORM ? multiply_halves(pair, norm) : pair;
                    };
                    if (which == 1)
                        a[BLOCKS - 1 + BLOCKS * i][1 + 2 * h] = scaled(last % 3);
                    else if constexpr (D == 128) {
                        a[BLOCKS * i][2 * h] = scaled(0);
                        a[BLOCKS * i][1 + 2 * h] = scaled(1);
                        a[1 + BLOCKS * i][2 * h] = scaled(2);
                    } else
                        a[i][2 * h] = scaled(first % 3);
                }
            }
    }
};

} // namespace kvant
