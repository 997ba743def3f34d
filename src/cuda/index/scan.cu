/* scan.cu - multiplies queries with all codes of an index, and keeps the vectors that may be among
 * the best.
 *
 * A thread block keeps up to 128 queries in shared memory, as the second operand of tensor cores.
 * It reads packs of codes one after another and unpacks them in registers (unpack.cuh). Codes are
 * bytes, so sums are exact. Keys are computed like kvant_pack_keys_c computes them, without fused
 * multiply-adds, so they have the same bits. */
#include "groups.cuh"
#include "index.h"
#include "unpack.cuh"

#include "../launch.h"

#include <type_traits>

namespace kvant
{

namespace
{

/* The groups of a round that a warpgroup takes: number first, first + parts, ... below end. In this
 * order, every beginning is spread over the index. */
struct Way {
    uint32_t i, group, parts, by;

    KVANT_INLINE Way(const ScanArgs &args, uint32_t part, uint32_t parts)
        : i(args.first + part), group(at(args, i)), parts(parts), by(at(args, parts))
    {
    }
    KVANT_INLINE static uint32_t at(const ScanArgs &args, uint32_t i)
    {
        return (uint32_t)((uint64_t)i * args.multiplier % args.n_groups);
    }
    KVANT_INLINE void advance(const ScanArgs &args)
    {
        i += parts;
        group += by;
        group -= group >= args.n_groups ? args.n_groups : 0;
    }
};

constexpr int STEP_DIMS = PIECE_DIMS / PIECE_STEPS;

/* For N queries at once: the halves of a pack that a warp takes, and the threads that take a group
 * of packs. If a warp sums one half only, there are registers for 16 warps per multiprocessor, so
 * that some unpack while others wait. All warps of a warpgroup have the same half. */
template <int N> constexpr int HALVES = N >= 64 ? 1 : 2;
template <int N> constexpr int TEAM = 32 * GROUP_PACKS * 2 / HALVES<N>;
template <int N> constexpr int THREADS = N >= 64 ? 512 : 384;
template <int N> constexpr int BLOCKS = N > 8 ? 1 : 2; /* the fewest blocks per multiprocessor */

/* The data of queries that a thread block keeps behind their numbers. */
template <int N> struct Queries {
    int starts[N]; /* start of each sum, in which the bias is subtracted */
    float thresholds[N], scales[N], weights[N];
};

template <int N> size_t shared_bytes(uint32_t n_pieces)
{
    return (size_t)n_pieces * PIECE_DIMS * N + sizeof(Queries<N>);
}

/* Stores numbers of a step in the order of wgmma and ldmatrix. 8 queries x 16 numbers are 128
 * bytes. The two halves of a step are two such blocks with the same queries. */
template <int BITS, int N>
__device__ void load_queries(const ScanArgs &args, uint32_t first, uint8_t *numbers)
{
    uint32_t *to = reinterpret_cast<uint32_t *>(numbers);
    const uint32_t n = args.n_pieces * PIECE_STEPS * N * 4;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        const uint32_t row = i / 4 % 8, t = i % 4, column = i / 32 % (N / 8) * 8 + row,
                       step = i / (4 * N), query = first + column, tile = query / 32;
        const uint32_t quads[2] = {
            step / 2 * PIECE_QUADS + PackOrder<BITS>::first(step % 2, t),
            step / 2 * PIECE_QUADS + PackOrder<BITS>::second(step % 2, t),
        };
        uint32_t words[2] = { 0, 0 }, low, high;
        if (query < args.n_queries) {
            const uint32_t in_tile = min(32u, args.n_queries - 32 * tile);
            const uint32_t *x = args.x + (size_t)tile * 32 * args.n_quads + query % 32;
            for (int j = 0; j < 2; j++)
                if (quads[j] < args.n_quads)
                    words[j] = x[(size_t)quads[j] * in_tile];
        }
        columns_of<BITS>(words[0], words[1], low, high);
        const uint32_t at = step * (N * STEP_DIMS / 4) + column / 8 * 64 + row * 4 + t;
        to[at] = low;
        to[at + 32] = high;
    }
}

template <int N>
__device__ void load_columns(const ScanArgs &args, uint32_t first, Queries<N> &queries)
{
    for (uint32_t i = threadIdx.x; i < N; i += blockDim.x) {
        const bool there = first + i < args.n_queries;
        queries.starts[i] = there ? -args.bias * args.sums[first + i] : 0;
        queries.thresholds[i] = there && !args.keep_all ? args.thresholds[first + i] : INFINITY;
        queries.scales[i] = there ? args.scales[first + i] : 0;
        queries.weights[i] = there ? args.weights[first + i] : 0;
    }
}

/* The sums of a warp: [half][8 columns]. */
template <int N> using Sums = int[HALVES<N>][N / 8][4];

/* The operands of a piece: [step][half]. */
template <int N> using Operands = uint32_t[PIECE_STEPS][HALVES<N>][4];

/* The vectors of a lane: [half][odd]. */
template <int N> struct Vectors {
    float factors[HALVES<N>][2], offsets[HALVES<N>][2];
};

/* slot: the slot of the lane's first vector. */
template <bool OFFSETS, int N>
KVANT_INLINE void load_vectors(const ScanArgs &args, uint32_t slot, Vectors<N> &vectors)
{
    unrolled_for (int half = 0; half < HALVES<N>; half++) {
        const float2 factors = *reinterpret_cast<const float2 *>(args.factors + slot + 16 * half);
        vectors.factors[half][0] = factors.x;
        vectors.factors[half][1] = factors.y;
        if (OFFSETS) {
            const float2 offsets =
                *reinterpret_cast<const float2 *>(args.offsets + slot + 16 * half);
            vectors.offsets[half][0] = offsets.x;
            vectors.offsets[half][1] = offsets.y;
        }
    }
}

KVANT_INLINE uint64_t id_of(const ScanArgs &args, uint32_t slot)
{
    return args.ids ? args.ids[slot] : slot;
}

KVANT_INLINE bool is_wanted(const ScanArgs &args, uint32_t slot)
{
    return slot < args.n_slots && (!args.passes || args.passes[slot / 32] >> slot % 32 & 1);
}

/* Adds a vector to a list if its key is not below the threshold. */
KVANT_INLINE void keep(const ScanArgs &args, uint32_t query, uint32_t slot, float key,
                       float threshold)
{
    if (!is_wanted(args, slot) || (key == threshold && id_of(args, slot) > args.limits[query]))
        return;
    const uint32_t at = atomicAdd(args.counts + query, 1);
    if (at < args.room)
        args.lists[(size_t)query * args.room + at] = Found{ key, slot };
}

/* Writes two neighbouring vectors to a list, if they are wanted. place: the place of the first in
 * the round's order, an even number. */
KVANT_INLINE void keep_both(const ScanArgs &args, uint32_t query, uint32_t slot, uint32_t place,
                            float first, float second)
{
    const bool wanted[2] = { is_wanted(args, slot) && first == first,
                             is_wanted(args, slot + 1) && second == second };
    if (query < args.n_queries)
        reinterpret_cast<uint4 &>(args.lists[(size_t)query * args.room + place]) =
            uint4{ __float_as_uint(first), wanted[0] ? slot : NO_VECTOR, __float_as_uint(second),
                   wanted[1] ? slot + 1 : NO_VECTOR };
}

/* Computes the keys of a lane's vectors for 2 of the 8 columns from 8 * j on. slot and place belong
 * to its first vector. */
template <bool OFFSETS, int N>
KVANT_INLINE void take(const ScanArgs &args, const Queries<N> &queries, uint32_t first, int j,
                       uint32_t slot, uint32_t place, const Vectors<N> &vectors,
                       const Sums<N> &sums)
{
    constexpr int KEYS = 4 * HALVES<N>; /* key i has half i / 4, odd i / 2 % 2 and column i % 2 */
    const uint32_t column = 8 * j + threadIdx.x % 4 * 2, query = first + column;
    const float2 thresholds = *reinterpret_cast<const float2 *>(queries.thresholds + column);
    float2 scales{}, weights{};
    if (OFFSETS) {
        scales = *reinterpret_cast<const float2 *>(queries.scales + column);
        weights = *reinterpret_cast<const float2 *>(queries.weights + column);
    }
    float keys[KEYS];
    bool any = false;
    unrolled_for (int i = 0; i < KEYS; i++) {
        const int half = i / 4, odd = i / 2 % 2;
        float key = __fmul_rn(__int2float_rn(sums[half][j][i % 4]), vectors.factors[half][odd]);
        if (OFFSETS)
            key = __fadd_rn(__fmul_rn(key, i % 2 ? scales.y : scales.x),
                            __fmul_rn(vectors.offsets[half][odd], i % 2 ? weights.y : weights.x));
        keys[i] = key;
        any |= key >= (i % 2 ? thresholds.y : thresholds.x);
    }
    if (args.keep_all) {
        unrolled_for (int i = 0; i < KEYS; i += 4) {
            keep_both(args, query, slot + 4 * i, place + 4 * i, keys[i], keys[i + 2]);
            keep_both(args, query + 1, slot + 4 * i, place + 4 * i, keys[i + 1], keys[i + 3]);
        }
        return;
    }
    if (!any)
        return;
    float kept[KEYS]; /* rarely executed: a loop is smaller than copies of the code */
    uint32_t passed = 0;
    unrolled_for (int i = 0; i < KEYS; i++) {
        kept[i] = keys[i];
        passed |= (uint32_t)(keys[i] >= (i % 2 ? thresholds.y : thresholds.x)) << i;
    }
    rolled_for (; passed; passed &= passed - 1) {
        const uint32_t i = __ffs((int)passed) - 1;
        keep(args, query + i % 2, slot + i / 4 * 16 + i / 2 % 2, kept[i],
             i % 2 ? thresholds.y : thresholds.x);
    }
}

/* The part of a group that a warp takes. */
struct Part {
    uint32_t pack, half;
};

template <int N> KVANT_INLINE Part part_of_warp()
{
    const uint32_t warp = threadIdx.x % TEAM<N> / 32;
    return { warp % GROUP_PACKS, warp / GROUP_PACKS };
}

/* The position at which a warp reads: two pieces of its packs at a time. */
template <int BITS> struct Cursor {
    static constexpr uint32_t PIECE = PIECE_QUADS * 16 * BITS, BYTES = 2 * PIECE;
    Way way;
    uint32_t left;     /* pairs of pieces that are left in the pack */
    const uint8_t *at; /* NULL behind the last pack */

    KVANT_INLINE Cursor(const ScanArgs &args, const Way &way, uint32_t pack) : way(way)
    {
        open(args, pack);
    }
    KVANT_INLINE void open(const ScanArgs &args, uint32_t pack)
    {
        left = args.n_pieces / 2;
        at = way.i < args.end
                 ? args.codes + (size_t)(way.group * GROUP_PACKS + pack) * args.pack_bytes
                 : nullptr;
    }
    KVANT_INLINE void advance(const ScanArgs &args, uint32_t pack)
    {
        at += BYTES;
        if (--left == 0) {
            way.advance(args);
            open(args, pack);
        }
    }
};

constexpr int SLOTS = 2; /* pieces that are being loaded to registers */

/* Reads pieces of a warp's packs. Two are being loaded to registers, and some more to the
 * second-level cache. */
template <int BITS, int N> struct Reader {
    static constexpr int AHEAD = 3, WORDS = BITS == 8 && HALVES<N> == 1 ? 4 : BITS;
    const ScanArgs &args;
    uint32_t lane;
    Part part;
    Cursor<BITS> loads, fetches;
    uint2 pieces[SLOTS][WORDS];

    KVANT_INLINE Reader(const ScanArgs &args, const Way &way)
        : args(args), lane(threadIdx.x % 32), part(part_of_warp<N>()), loads(args, way, part.pack),
          fetches(loads)
    {
        for (int i = 0; i < AHEAD; i++)
            fetch();
        ask<0>();
        ask<1>();
    }
    KVANT_INLINE void fetch()
    {
        if (part.half > 0 || !fetches.at)
            return;
        if (lane * 128 < fetches.BYTES)
            prefetch_line(fetches.at, lane * 128);
        fetches.advance(args, part.pack);
    }
    template <int SLOT> KVANT_INLINE void ask()
    {
        if (!loads.at)
            return;
        const uint8_t *at = loads.at + SLOT * Cursor<BITS>::PIECE;
        load_piece<BITS>(pieces[SLOT], WORDS < BITS ? at + 64 * part.half : at, lane / 4, lane % 4);
        if (SLOT == SLOTS - 1)
            loads.advance(args, part.pack);
    }
    template <int SLOT> KVANT_INLINE void take(const PackLevels &levels, Operands<N> &a)
    {
        constexpr int LAST = HALVES<N> - 1;
        if (LAST > 0 || part.half == 0) {
            operand_of<BITS, 0, 0>(levels, pieces[SLOT], a[0][0]);
            operand_of<BITS, 1, 0>(levels, pieces[SLOT], a[1][0]);
        }
        if (LAST > 0 || part.half == 1) {
            operand_of<BITS, 0, 1>(levels, pieces[SLOT], a[0][LAST]);
            operand_of<BITS, 1, 1>(levels, pieces[SLOT], a[1][LAST]);
        }
        ask<SLOT>();
        if (SLOT == SLOTS - 1)
            fetch();
    }
};

/* sums += piece times queries, for each warp by itself. */
template <int BITS, int N>
KVANT_INLINE void multiply(const Operands<N> &a, const uint8_t *numbers, uint32_t lane,
                           Sums<N> &sums)
{
    unrolled_for (int step = 0; step < PIECE_STEPS; step++)
        unrolled_for (int j = 0; j < N / 8; j += 2) {
            uint32_t b[4];
            const uint8_t *at = numbers + step * N * STEP_DIMS + j * 256;
            if constexpr (N > 8) {
                load_matrices<false>(b, reinterpret_cast<const __half *>(at + lane * 16));
            } else {
                b[0] = *reinterpret_cast<const uint32_t *>(at + lane * 4);
                b[1] = *reinterpret_cast<const uint32_t *>(at + 128 + lane * 4);
            }
            unrolled_for (int half = 0; half < HALVES<N>; half++) {
                mma_bytes<true, true>(sums[half][j], a[step][half], b[0], b[1]);
                if constexpr (N > 8)
                    mma_bytes<true, true>(sums[half][j + 1], a[step][half], b[2], b[3]);
            }
        }
}

/* sums += pack times queries; n_pieces is even. */
template <int BITS, int N> struct WarpProducts {
    KVANT_INLINE WarpProducts(const PackLevels &, Reader<BITS, N> &)
    {
    }
    KVANT_INLINE void add(const PackLevels &levels, Reader<BITS, N> &reader, const uint8_t *numbers,
                          uint32_t n_pieces, Sums<N> &sums)
    {
        for (uint32_t p = 0; p < n_pieces; p += 2, numbers += 2 * PIECE_DIMS * N) {
            Operands<N> a;
            reader.template take<0>(levels, a);
            multiply<BITS, N>(a, numbers, reader.lane, sums);
            reader.template take<1>(levels, a);
            multiply<BITS, N>(a, numbers + PIECE_DIMS * N, reader.lane, sums);
        }
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* The same by wgmma. A piece is unpacked while the piece before it is multiplied, also if it is the
 * first of the next pack. */
template <int BITS, int N> struct GroupProducts {
    Operands<N> even, odd;

    KVANT_INLINE GroupProducts(const PackLevels &levels, Reader<BITS, N> &reader)
    {
        reader.template take<0>(levels, even);
    }
    KVANT_INLINE static void begin(Sums<N> &sums, Operands<N> &a, const uint8_t *numbers)
    {
        hold_operands(a);
        begin_products();
        unrolled_for (int step = 0; step < PIECE_STEPS; step++)
            begin_product(sums[0], a[step][0], columns_at(numbers + step * N * STEP_DIMS));
        commit_products();
    }
    KVANT_INLINE void add(const PackLevels &levels, Reader<BITS, N> &reader, const uint8_t *numbers,
                          uint32_t n_pieces, Sums<N> &sums)
    {
        for (uint32_t p = 0; p < n_pieces; p += 2, numbers += 2 * PIECE_DIMS * N) {
            begin(sums, even, numbers);
            reader.template take<1>(levels, odd);
            finish_products(sums, even);
            begin(sums, odd, numbers + PIECE_DIMS * N);
            reader.template take<0>(levels, even);
            finish_products(sums, odd);
        }
    }
};

template <int BITS, int N>
using Products = std::conditional_t<(N >= 64), GroupProducts<BITS, N>, WarpProducts<BITS, N>>;

#else

template <int BITS, int N> using Products = WarpProducts<BITS, N>;

#endif

template <int BITS, int N, bool OFFSETS>
__global__ void __launch_bounds__(THREADS<N>, BLOCKS<N>)
    scan_kernel(const __grid_constant__ ScanArgs args)
{
    extern __shared__ __align__(128) uint8_t numbers[];
    Queries<N> &queries =
        *reinterpret_cast<Queries<N> *>(numbers + (size_t)args.n_pieces * PIECE_DIMS * N);
    const uint32_t tiles = (args.n_queries + N - 1) / N, first = blockIdx.x % tiles * N,
                   teams = THREADS<N> / TEAM<N>, parts = gridDim.x / tiles * teams,
                   part = blockIdx.x / tiles * teams + threadIdx.x / TEAM<N>;
    const PackLevels levels{ { args.levels[0], args.levels[1], args.levels[2], args.levels[3] },
                             args.bias };
    load_queries<BITS, N>(args, first, numbers);
    load_columns<N>(args, first, queries);
    publish_columns();
    __syncthreads();

    Way way(args, part, parts);
    Reader<BITS, N> reader(args, way);
    Products<BITS, N> products(levels, reader);
    for (; way.i < args.end; way.advance(args)) {
        const uint32_t in_group = reader.part.pack * PACK_VECTORS + reader.part.half * 16 +
                                  reader.lane / 4 * 2,
                       slot = way.group * GROUP_VECTORS + in_group, t = reader.lane % 4;
        Sums<N> sums;
        Vectors<N> vectors;
        load_vectors<OFFSETS, N>(args, slot, vectors);
        unrolled_for (int j = 0; j < N / 8; j++) {
            const int2 starts = *reinterpret_cast<const int2 *>(queries.starts + 8 * j + 2 * t);
            unrolled_for (int half = 0; half < HALVES<N>; half++) {
                sums[half][j][0] = sums[half][j][2] = starts.x;
                sums[half][j][1] = sums[half][j][3] = starts.y;
            }
        }
        products.add(levels, reader, numbers, args.n_pieces, sums);
        const uint32_t place = (way.i - args.first) * GROUP_VECTORS + in_group;
        unrolled_for (int j = 0; j < N / 8; j++)
            take<OFFSETS, N>(args, queries, first, j, slot, place, vectors, sums);
    }
}

template <int BITS, int N> cudaError_t launch(const ScanArgs &args, cudaStream_t stream)
{
    const auto kernel = args.offsets ? scan_kernel<BITS, N, true> : scan_kernel<BITS, N, false>;
    const int shared = (int)shared_bytes<N>(args.n_pieces);
    int blocks = 0;
    cudaError_t error = allow_shared(reinterpret_cast<const void *>(kernel), shared);
    if (error == cudaSuccess)
        error = blocks_at_once(reinterpret_cast<const void *>(kernel), THREADS<N>, shared, blocks);
    if (error != cudaSuccess)
        return error;
    const uint32_t tiles = (args.n_queries + N - 1) / N, teams = THREADS<N> / TEAM<N>,
                   most = (args.end - args.first + teams - 1) / teams;
    const uint32_t wanted = (uint32_t)blocks / tiles, parts = wanted < 1      ? 1
                                                              : wanted < most ? wanted
                                                                              : most;
    kernel<<<tiles * parts, THREADS<N>, shared, stream>>>(args);
    return cudaGetLastError();
}

/* Launches with as many queries at once as there are, or as shared memory holds. */
template <int BITS> cudaError_t launch_bits(const ScanArgs &args, cudaStream_t stream)
{
    int most = 0;
    const cudaError_t error = most_shared(most);
    if (error != cudaSuccess)
        return error;
    const auto fits = [&](size_t bytes) { return bytes <= (size_t)most; };
    if (args.n_queries > 64 && fits(shared_bytes<128>(args.n_pieces)))
        return launch<BITS, 128>(args, stream);
    if (args.n_queries > 32 && fits(shared_bytes<64>(args.n_pieces)))
        return launch<BITS, 64>(args, stream);
    if (args.n_queries > 8 && fits(shared_bytes<32>(args.n_pieces)))
        return launch<BITS, 32>(args, stream);
    return launch<BITS, 8>(args, stream);
}

} // namespace

cudaError_t launch_scan(const ScanArgs &args, uint32_t bits, cudaStream_t stream)
{
    switch (bits) {
    case 1: return launch_bits<1>(args, stream);
    case 2: return launch_bits<2>(args, stream);
    case 3: return launch_bits<3>(args, stream);
    case 4: return launch_bits<4>(args, stream);
    case 8: return launch_bits<8>(args, stream);
    default: return cudaErrorInvalidValue;
    }
}

} // namespace kvant
