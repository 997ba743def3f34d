/* any_chunks.cuh - chunk codes whose sizes are arguments of a launch (ChunkSizes): octopus of any
 * split, hqmq of any numbers of directions and radii, and other tables of directions. Sizes that
 * are constants, and an explanation of operands, are in chunks.cuh. Kernels of any/ look numbers up
 * in the same tables. */
#pragma once

#include "chunks.cuh"

namespace kvant
{

/* The sizes of a codec whose tables are on the device. */
__host__ __device__ inline ChunkSizes sizes_of(const kvant_general &g)
{
    const auto &c = g.view.chunks;
    const int index = (int)c.index_bits, length = (int)c.length_bits;
    return ChunkSizes{ index + length,
                       index,
                       length,
                       (int)g.metadata,
                       g.tables + c.direction,
                       g.tables + c.norm,
                       reinterpret_cast<const uint2 *>(g.tables + g.halves),
                       (int)c.n_codewords,
                       (int)c.slots };
}

/* Bytes of one copy of a codec's tables, if two blocks of kernels of any/ find room for them; else
 * 0. */
__host__ __device__ inline int small_table_bytes(const kvant_cuda_params &params,
                                                 const kvant_general &g)
{
    const auto &c = g.view.chunks;
    if (params.decoder == KVANT_CUDA_OCTOPUS_SPLITS)
        return c.index_bits <= 12
                   ? ((8 << (c.index_bits - 2)) + (16 << c.length_bits) + 15) / 16 * 16
                   : 0;
    return params.decoder == KVANT_CUDA_HQMQ_SIZES && c.n_codewords < 5000
               ? ((int)c.n_codewords + 4) / 4 * 16
               : 0;
}

/* Codes of up to 23 bits, two in a word, from bits 0 and 16 on. */
template <int CHUNKS, bool KEYS> struct CodePairs {
    /* x[4 h + i]: tokens 8 h further; i is the row tile for keys and the column tile for values */
    uint32_t x[8];

    /* Loads the plane of 16 bits. at: a pair of chunks for keys, a chunk for values. */
    KVANT_INLINE void load(const uint32_t *plane, int at, int lane)
    {
        if constexpr (KEYS) {
            load_words<4>(plane + 64 * at + (lane & 28), *reinterpret_cast<uint32_t(*)[4]>(x));
            load_words<4>(plane + 64 * at + 32 + (lane & 28),
                          *reinterpret_cast<uint32_t(*)[4]>(x + 4));
        } else
            unrolled_for (int n = 0; n < 8; n++)
                x[n] = plane[CHUNKS * (8 * (lane & 3) + n) + at];
    }

    /* Loads all narrower planes; the lowest 4 bits of `bits` say which exist. */
    KVANT_INLINE void load_narrow(const uint32_t *plane, int bits, int at, int lane)
    {
        unrolled_for (int n = 0; n < 8; n++)
            x[n] = 0;
        add<8>(plane, bits, at, lane);
        add<4>(plane, bits, at, lane);
        add<2>(plane, bits, at, lane);
        add<1>(plane, bits, at, lane);
    }

    /* Adds a plane of P bits above wider planes. */
    template <int P> KVANT_INLINE void add(const uint32_t *&plane, int bits, int at, int lane)
    {
        if (!(bits & P))
            return;
        const int to = bits & 15 & -2 * P;
        const uint32_t mask = ((1u << P) - 1) * 0x10001u << to;
        if constexpr (KEYS) {
            uint32_t w[4];
            const int row = lane >> 2;
            load_words<4>(plane + 4 * P * at + 4 * (row % P), w);
            unrolled_for (int n = 0; n < 8; n++)
                x[n] |= rotate_left(w[n % 4], to - P * (row / P) - 8 * (n / 4)) & mask;
        } else {
            constexpr int FIELDS = 16 / P;
            const int column = lane & 3, left = to - (P == 1 ? 8 * (column % 2) : 0);
            unrolled_for (int n = 0; n < 8; n++)
                x[n] |= rotate_left(plane[CHUNKS * (8 * column / FIELDS + n / FIELDS) + at],
                                    left - P * (n % FIELDS)) &
                        mask;
        }
        plane += chunk_plane_words(P, CHUNKS, KEYS);
    }
};

/* Outlier slots per token that decode kernels have room for. */
__host__ __device__ constexpr int most_slots(int head_dim)
{
    return (head_dim + 63) / 64;
}

/* The number of copies of n entries that fit `bytes` bytes, rounded down to a power of two. */
__host__ __device__ constexpr int copies_in(int bytes, int entry_bytes, int log_n)
{
    const int most = bytes / entry_bytes >> log_n, banks = 128 / entry_bytes;
    return most < banks ? most : banks;
}

/* Triplets of up to 16 bits. The octahedral map is symmetric, and so are its levels: a level and
 * its negative have codes that differ in all bits. Then all bits of x ^ x >> 1 but the highest are
 * the same for both. They find the direction in the quadrant of positive coordinates; signs of two
 * are looked up with the norm, as numbers that multiply the direction. */
struct OctopusSplits : ChunkCodes, AnySizes {
    static constexpr kvant_cuda_kind KIND = KVANT_CUDA_OCTOPUS_SPLITS;
    static constexpr int CHANNELS = 3, BITS = 16, MOST_WARPS = 8;
    static constexpr float UNIT = 1;
    static constexpr bool SAME_TABLE = true; /* attention serves no other codecs (launch.cu) */
    static constexpr int SIGN_BYTES = 8192;

    template <bool LARGE> __host__ __device__ static constexpr int direction_bytes()
    {
        return LARGE ? 1 << 16 : 1 << 15;
    }
    template <bool LARGE> __host__ __device__ static constexpr int bytes()
    {
        return direction_bytes<LARGE>() + SIGN_BYTES;
    }

    /* The copies of both tables, and the offset of the second. */
    struct Copies {
        int directions, signs, signs_at;
    };

    template <bool LARGE> KVANT_INLINE static Copies copies_of(const ChunkSizes &sizes)
    {
        return Copies{ copies_in(direction_bytes<LARGE>(), 8, sizes.index_bits - 2),
                       copies_in(SIGN_BYTES, 4, sizes.length_bits + 2), direction_bytes<LARGE>() };
    }

    struct Table {
        int bits, coordinate;           /* bits of a code, and of a coordinate */
        uint32_t directions, signs;     /* the lane's copies */
        uint32_t direction_by, sign_by; /* distances between two entries */
        uint32_t u, w, norm;            /* masks */
    };

    KVANT_INLINE static Copies one_copy(const ChunkSizes &sizes)
    {
        return Copies{ 1, 1, 8 << (sizes.index_bits - 2) };
    }

    KVANT_INLINE static Table table(const uint8_t *entries, const ChunkSizes &sizes,
                                    const Copies &n, int lane)
    {
        const int c = sizes.index_bits / 2;
        const uint32_t ones = (1u << (c - 1)) - 1;
        return Table{ sizes.bits,
                      c,
                      shared_address(entries) + 8 * (lane & (n.directions - 1)),
                      shared_address(entries) + n.signs_at + 4 * (lane & (n.signs - 1)),
                      8u * n.directions,
                      4u * n.signs,
                      ones * 0x10001u,
                      (ones << (c - 1)) * 0x10001u,
                      ((1u << (sizes.length_bits + 1)) - 1) * 0x20002u };
    }

    /* The state of two codes. */
    struct Two {
        uint32_t direction, sign;

        KVANT_INLINE Two(uint32_t x, const Table &t)
        {
            const uint32_t folded = x ^ x >> 1;
            direction = (folded & t.u) | (folded >> 1 & t.w);
            sign = (x >> (2 * t.coordinate - 2) & t.norm) | (x >> (t.coordinate - 1) & 0x10001u);
        }

        /* The numbers x, y and z of one of the codes. */
        KVANT_INLINE uint2 numbers(const Table &t, int i) const
        {
            const uint2 x =
                look_up_two_words(__dp2a_lo(direction, t.direction_by << 8 * i, t.directions));
            const uint32_t s = look_up_word(__dp2a_lo(sign, t.sign_by << 8 * i, t.signs));
            return make_uint2(multiply_halves(x.x, s), multiply_halves(x.y, s & 0x7fff7fffu));
        }
    };

    template <bool WIDE, class P>
    KVANT_INLINE static void load(P &pairs, const uint8_t *page, const Table &t, int at, int lane)
    {
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
        if (WIDE)
            pairs.load(words, at, lane);
        else
            pairs.load_narrow(words, t.bits, at, lane);
    }

    template <int D, bool WIDE, class F>
    KVANT_INLINE static void key_tiles(const uint8_t *page, int lane, const Table &t, F &&use)
    {
        using P = ChunkPlaces<OctopusSplits, D>;
        unrolled_for (int step = 0; step < P::KEY_STEPS; step++) {
            CodePairs<P::CHUNKS, true> codes;
            load<WIDE>(codes, page, t, min(4 * step + (lane & 3), (P::CHUNKS - 1) / 2),
                       lane); /* no values, which may not have arrived yet */
            unrolled_for (int rt = 0; rt < 4; rt++) {
                uint32_t a[2][4];
                unrolled_for (int h = 0; h < 2; h++) {
                    const Two two(codes.x[4 * h + rt], t);
                    unrolled_for (int e = 0; e < 2; e++) {
                        const uint2 x = two.numbers(t, e);
                        a[e][h] = x.x, a[e][h + 2] = x.y;
                    }
                }
                use(rt, 2 * step, a[0]);
                use(rt, 2 * step + 1, a[1]);
            }
        }
    }

    template <int D, bool WIDE, class F>
    KVANT_INLINE static void value_tiles(const uint8_t *page, int lane, const Table &t, F &&use)
    {
        using P = ChunkPlaces<OctopusSplits, D>;
        unrolled_for (int g = 0; g < P::VALUE_GROUPS; g++) {
            CodePairs<P::CHUNKS, false> codes[2];
            unrolled_for (int far = 0; far < 2; far++)
                load<WIDE>(codes[far], page, t, 16 * g + 8 * far + (lane >> 2), lane);
            unrolled_for (int ct = 0; ct < 4; ct++) {
                uint32_t a[3][4];
                unrolled_for (int part = 0; part < 4; part++) {
                    const int h = part % 2, far = part / 2;
                    const Two two(codes[far].x[4 * h + ct], t);
                    const uint2 x = two.numbers(t, 0), y = two.numbers(t, 1);
                    const uint32_t n[3] = { prmt(x.x, y.x, 0x5410), prmt(x.x, y.x, 0x7632),
                                            prmt(x.y, y.y, 0x5410) };
                    unrolled_for (int k = 0; k < 3; k++)
                        a[(3 * far + k) / 2][(3 * far + k) % 2 + 2 * h] = n[k];
                }
                unrolled_for (int k = 0; k < 3; k++)
                    use(3 * g + k, ct, a[k]);
            }
        }
    }

    /* Both widths of planes are compiled separately, because jumping over code costs time. */
    template <int D, class F>
    KVANT_INLINE static void for_each_key_tile(const uint8_t *page, int lane, const Table &t,
                                               F &&use)
    {
        t.bits == 16 ? key_tiles<D, true>(page, lane, t, use)
                     : key_tiles<D, false>(page, lane, t, use);
    }

    template <int D, class F>
    KVANT_INLINE static void for_each_value_tile(const uint8_t *page, int lane, const Table &t,
                                                 F &&use)
    {
        t.bits == 16 ? value_tiles<D, true>(page, lane, t, use)
                     : value_tiles<D, false>(page, lane, t, use);
    }

    /* The level above 0 whose code x gives x ^ x >> 1 == folded, except in the highest bit. */
    __device__ static float level(const ChunkSizes &sizes, uint32_t folded)
    {
        const int c = sizes.index_bits / 2;
        uint32_t x = 1u << (c - 1);
        for (int bit = c - 2; bit >= 0; bit--)
            x |= (folded ^ x >> 1) & 1u << bit;
        return __ldg(sizes.direction + x);
    }

    /* Fills the tables. A thread loads several levels before it uses one. */
    __device__ static void fill(uint8_t *entries, const ChunkSizes &sizes, const Copies &n)
    {
        constexpr int BATCH = 4;
        const int c = sizes.index_bits / 2, log_signs = sizes.length_bits + 2,
                  count = 1 << (2 * c - 2), mask = (1 << (c - 1)) - 1;
        uint2 *directions = reinterpret_cast<uint2 *>(entries);
        uint32_t *signs = reinterpret_cast<uint32_t *>(entries + n.signs_at);
        for (int first = threadIdx.x; first < count; first += BATCH * blockDim.x) {
            float u[BATCH], w[BATCH];
            unrolled_for (int b = 0; b < BATCH; b++) {
                const int i = first + b * blockDim.x;
                u[b] = level(sizes, i & mask), w[b] = level(sizes, i >> (c - 1) & mask);
            }
            unrolled_for (int b = 0; b < BATCH; b++) {
                const float z = 1 - u[b] - w[b], fold = fmaxf(-z, 0), x = u[b] - fold,
                            y = w[b] - fold, f = 1 / sqrtf(x * x + y * y + z * z);
                if (first + b * (int)blockDim.x < count)
                    store_copies(directions, first + b * blockDim.x, n.directions,
                                 make_uint2(pack_half2(f * x, f * y), pack_half2(f * z, 0)));
            }
        }
        for (int i = threadIdx.x; i < 1 << log_signs; i += blockDim.x) {
            const float norm = __ldg(sizes.norm + i / 4);
            for (int k = 0; k < n.signs; k++)
                signs[i * n.signs + ((k + i) & (n.signs - 1))] =
                    pack_half2(i & 1 ? norm : -norm, i & 2 ? norm : -norm);
        }
    }
};

/* Directions of up to 13 bits as bytes, radii of up to 7. A radius r stands as the subnormal r x
 * 2^-20, so that no bit of its product with a byte is lost. */
struct HqmqSizes : ChunkCodes, AnySizes {
    static constexpr kvant_cuda_kind KIND = KVANT_CUDA_HQMQ_SIZES;
    static constexpr int CHANNELS = 4, BITS = 20, MOST_WARPS = 8, RADIUS_LOG = 4;
    static constexpr float UNIT = (float)(1 << (17 - RADIUS_LOG));
    static constexpr bool SAME_TABLE = false;
    using Radii = Hqmq<96, 12, 4>::Radii;

    template <bool LARGE> __host__ __device__ static constexpr int bytes()
    {
        return 1 << 15;
    }
    template <bool LARGE> KVANT_INLINE static int copies_of(const ChunkSizes &sizes)
    {
        return copies_in(bytes<LARGE>(), 4, sizes.index_bits);
    }

    struct Table {
        int bits, index_bits;
        uint32_t directions, direction_by;
        uint32_t index, low,
            /* masks for two codes: of their indices, and of the radius bits below and above bit 16
             * of a code */
            high;
    };

    KVANT_INLINE static int one_copy(const ChunkSizes &)
    {
        return 1;
    }

    KVANT_INLINE static Table table(const uint8_t *entries, const ChunkSizes &sizes, int n,
                                    int lane)
    {
        const int log = sizes.index_bits;
        const uint32_t radius = ((1u << sizes.length_bits) - 1) << RADIUS_LOG,
                       below = ((1u << (16 - log)) - 1) << RADIUS_LOG;
        return Table{ sizes.bits,
                      log,
                      shared_address(entries) + 4 * (lane & (n - 1)),
                      4u * n,
                      ((1u << log) - 1) * 0x10001u,
                      (radius & below) * 0x10001u,
                      (radius & ~below) * 0x10001u };
    }

    /* The state of two codes. */
    struct Two {
        uint32_t x, y; /* directions of the codes */
        Radii radii;

        KVANT_INLINE Two(uint32_t low, uint32_t high, const Table &t)
            : x(look_up_word(__dp2a_lo(low & t.index, t.direction_by, t.directions))),
              y(look_up_word(__dp2a_lo(low & t.index, t.direction_by << 8, t.directions))),
              radii((rotate_left(low, RADIUS_LOG - t.index_bits) & t.low) |
                    (rotate_left(high, RADIUS_LOG + 16 - t.index_bits) & t.high))
        {
        }
    };

    template <bool WIDE, class P>
    KVANT_INLINE static void load(P &low, P &high, const uint8_t *page, int plane, const Table &t,
                                  int at, int lane)
    {
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
        if (WIDE) {
            low.load(words, at, lane);
            high.load_narrow(words + plane, t.bits, at, lane);
        } else {
            low.load_narrow(words, t.bits, at, lane);
            unrolled_for (int n = 0; n < 8; n++)
                high.x[n] = 0;
        }
    }

    template <int D, bool WIDE, class F>
    KVANT_INLINE static void key_tiles(const uint8_t *page, int lane, const Table &t, F &&use)
    {
        using P = ChunkPlaces<HqmqSizes, D>;
        unrolled_for (int step = 0; step < P::KEY_STEPS; step++) {
            CodePairs<P::CHUNKS, true> low, high;
            load<WIDE>(low, high, page, chunk_plane_words(16, P::CHUNKS, true), t,
                       4 * step + (lane & 3), lane);
            unrolled_for (int rt = 0; rt < 4; rt++) {
                uint32_t a[2][4];
                unrolled_for (int h = 0; h < 2; h++) {
                    const Two two(low.x[4 * h + rt], high.x[4 * h + rt], t);
                    a[0][h] = two.radii.template times_one<0, 1, false>(two.x);
                    a[0][h + 2] = two.radii.template times_one<2, 3, false>(two.x);
                    a[1][h] = two.radii.template times_one<0, 1, true>(two.y);
                    a[1][h + 2] = two.radii.template times_one<2, 3, true>(two.y);
                }
                use(rt, 2 * step, a[0]);
                use(rt, 2 * step + 1, a[1]);
            }
        }
    }

    template <int D, bool WIDE, class F>
    KVANT_INLINE static void value_tiles(const uint8_t *page, int lane, const Table &t, F &&use)
    {
        using P = ChunkPlaces<HqmqSizes, D>;
        unrolled_for (int g = 0; g < P::VALUE_GROUPS; g++) {
            CodePairs<P::CHUNKS, false> low, high;
            load<WIDE>(low, high, page, chunk_plane_words(16, P::CHUNKS, false), t,
                       8 * g + (lane >> 2), lane);
            unrolled_for (int ct = 0; ct < 4; ct++) {
                uint32_t a[2][4];
                unrolled_for (int h = 0; h < 2; h++) {
                    const Two two(low.x[4 * h + ct], high.x[4 * h + ct], t);
                    const uint32_t near = prmt(two.x, two.y, 0x5140),
                                   far = prmt(two.x, two.y, 0x7362);
                    a[0][2 * h] = two.radii.template times<0, 1>(near);
                    a[0][2 * h + 1] = two.radii.template times<2, 3>(near);
                    a[1][2 * h] = two.radii.template times<0, 1>(far);
                    a[1][2 * h + 1] = two.radii.template times<2, 3>(far);
                }
                use(2 * g, ct, a[0]);
                use(2 * g + 1, ct, a[1]);
            }
        }
    }

    /* The same as for octopus. */
    template <int D, class F>
    KVANT_INLINE static void for_each_key_tile(const uint8_t *page, int lane, const Table &t,
                                               F &&use)
    {
        t.bits & 16 ? key_tiles<D, true>(page, lane, t, use)
                    : key_tiles<D, false>(page, lane, t, use);
    }

    template <int D, class F>
    KVANT_INLINE static void for_each_value_tile(const uint8_t *page, int lane, const Table &t,
                                                 F &&use)
    {
        t.bits & 16 ? value_tiles<D, true>(page, lane, t, use)
                    : value_tiles<D, false>(page, lane, t, use);
    }

    /* Fills the table with n copies. The entry after the last codeword is zero, for outliers. Codes
     * of tokens that do not exist may find other bytes. A thread loads several codewords before it
     * uses one. */
    __device__ static void fill(uint8_t *entries, const ChunkSizes &sizes, int n)
    {
        constexpr int BATCH = 8;
        const int count = min(sizes.n_codewords + 1, 1 << sizes.index_bits);
        for (int first = threadIdx.x; first < count; first += BATCH * blockDim.x) {
            uint2 halves[BATCH];
            unrolled_for (int b = 0; b < BATCH; b++)
                halves[b] = __ldg(sizes.codewords +
                                  min(first + b * (int)blockDim.x, sizes.n_codewords - 1));
            unrolled_for (int b = 0; b < BATCH; b++) {
                const int i = first + b * (int)blockDim.x;
                const float2 y[2] = {
                    __half22float2(*reinterpret_cast<const __half2 *>(&halves[b].x)),
                    __half22float2(*reinterpret_cast<const __half2 *>(&halves[b].y))
                };
                uint32_t own = 0;
                unrolled_for (int k = 0; k < 4; k++)
                    own |= i >= sizes.n_codewords
                               ? 128u << 8 * k
                               : (uint32_t)min(
                                     128 + __float2int_rn(128 * (k % 2 ? y[k / 2].y : y[k / 2].x)),
                                     255)
                                     << 8 * k;
                for (int k = 0; k < n && i < count; k++)
                    reinterpret_cast<uint32_t *>(entries)[i * n + k] = own;
            }
        }
    }
};

template <class C> constexpr bool HAS_OUTLIERS = std::is_same<C, HqmqSizes>::value;

} // namespace kvant
