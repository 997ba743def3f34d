/* attention.cuh - decode attention on compressed pages: the kernel.
 *
 * A thread block takes a piece of the line of pages (schedule.cuh). Its warps share the pages of
 * the piece in a fixed rotation, each through its own ring (feeder.cuh). Warps meet only where a
 * (sequence, kv head) pair ends; there the sums of the warps are added in the order of warps.
 *
 * A pair that lies wholly in the piece is finished at once. A pair that several thread blocks share
 * leaves one partial result per thread block. The warp that finishes a head last adds the head's
 * partial results in the order of thread blocks. All orders are fixed, so the same input gives the
 * same bits. A thread block has at most two partial results: for the pair in which its piece
 * begins, and for the pair in which it ends.
 *
 * The query rows of a kv head (its query heads for every query token) are the columns of every MMA.
 * So a code is unpacked once for 8 or 16 rows. */
#pragma once

#include "prefetch.cuh"
#include "combine.cuh"
#include "feeder.cuh"
#include "further_tiles.cuh"
#include "open.cuh"
#include "shape.cuh"

#include <type_traits>

namespace kvant
{

/* Outputs of sequences without tokens: nobody else writes them. */
template <class L>
static __device__ __noinline__ void clear_empty(const AttentionArgs &p, const L &lengths,
                                                int head_dim)
{
    const int n_heads = p.kv_heads * p.heads_a_kv, size = p.out_type == KVANT_CUDA_F32 ? 4 : 2;
    for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
        if (lengths.length(b) > 0)
            continue;
        for (int token = 0; token < lengths.queries(b); token++) {
            const QueryRow at = query_row(p, b, token);
            for (int i = threadIdx.x; i < n_heads * head_dim * size / 2; i += blockDim.x) {
                size_t row = at.out + i / (head_dim * size / 2) * p.out_head_stride;
                static_cast<uint16_t *>(p.out)[row * size / 2 + i % (head_dim * size / 2)] = 0;
            }
            for (int h = threadIdx.x; p.lse && h < n_heads; h += blockDim.x)
                p.lse[at.row * n_heads + h] = p.sinks ? p.sinks[h] : -INFINITY;
        }
    }
}

/* The warp's sums of a pair, of tile t, into shared memory: rows of D numbers, 4 apart in banks. */
template <class C, int D>
KVANT_INLINE void store_sums(const Accumulator<C, D> &sums, float *rows, int t, int n_columns,
                             int lane)
{
    int row = lane >> 2, column = 8 * t + 2 * (lane & 3);
    unrolled_for (int h = 0; h < 2; h++)
        if (column + h < n_columns)
            unrolled_for (int i = 0; i < 2 * Accumulator<C, D>::TILES; i++) {
                const int channel = value_channel<C, D>(i / 2, row, i % 2);
                if (!HAS_CHUNKS<C> || channel < D)
                    rows[(column + h) * (D + 4) + channel] = sums.o[i / 2][h + 2 * (i % 2)];
            }
}

/* The pages of one pair that lie in the block's piece. The pair begins at place `first` of the
 * line; the stretch ends before place `end`. */
template <bool GENERAL> struct Stretch {
    Cursor<GENERAL> cursor;
    Pair pair;
    int first, end;
    int tokens, skipped; /* from the first of these pages on; before it */
    int first_position;  /* of the sequence's query tokens */
    Matrices matrices;

    /* The numbers of an array that has one for each entry of the table: page i has number i. */
    template <class T>
    KVANT_INLINE const T *numbers_of(const AttentionArgs &p, const T *numbers) const
    {
        return numbers + pair.b * p.table_stride + skipped / PAGE_TOKENS - first;
    }
    /* The number in its sequence of page i of the line. */
    KVANT_INLINE int page_of(int i) const
    {
        return skipped / PAGE_TOKENS + i - first;
    }
};

/* The matrices of a stretch's pages from page i of the line on. */
template <class S>
KVANT_INLINE Matrices find_matrices(const AttentionArgs &p, const S &at, int i, int lane)
{
    if (!p.matrices)
        return Matrices{ 1 };
    const uint8_t *numbers = at.numbers_of(p, p.matrices);
    uint32_t own = 0;
#pragma unroll 1
    for (i += lane; i < at.end; i += 32)
        own |= 1u << __ldg(numbers + i);
    return Matrices{ __reduce_or_sync(FULL, own) };
}

/* The stretch that begins with page i of the line, which lies at the cursor or behind it. */
template <bool GENERAL, int COLUMNS>
KVANT_INLINE Stretch<GENERAL> stretch_from(const Lengths<GENERAL, COLUMNS> &lengths,
                                           const Piece<GENERAL> &piece, Cursor<GENERAL> cursor,
                                           int i)
{
    cursor.seek(lengths, i);
    const int head = cursor.head(i), first = cursor.first + head * cursor.pages,
              skipped = PAGE_TOKENS * lengths.first_page(cursor.b);
    return Stretch<GENERAL>{ cursor,
                             find_pair(lengths.p, lengths, cursor.b, head),
                             first,
                             min(piece.end, first + cursor.pages),
                             lengths.length(cursor.b) - skipped,
                             skipped,
                             GENERAL ? lengths.first_position(cursor.b) : 0,
                             Matrices{ 1 } };
}

/* Whether all pages of a piece are open, so that tables are of no use. False if the piece has more
 * than 32 pages, or several pairs. */
template <class S, class P>
KVANT_INLINE bool are_open(const AttentionArgs &p, const S &at, const P &piece, int lane)
{
    const int i = piece.begin + lane;
    const int32_t entry = i < at.end ? __ldg(at.numbers_of(p, p.table) + i) : -1;
    return at.end == piece.end && piece.begin + 32 >= piece.end &&
           __all_sync(FULL, entry < 0 && entry != KVANT_CUDA_NO_BLOCK);
}

/* Adds the open blocks of a stretch, from page i on; true if the warp took part. They come after
 * the sealed pages, so that the loop over sealed pages holds no call and keeps its operands in
 * registers. */
template <class C, int D, bool GENERAL, bool MANY, bool STAGED, int WARPS, int TILES, class Q>
KVANT_INLINE bool attend_open_pages(const AttentionArgs &p, const Q &queries,
                                    const Stretch<GENERAL> &at, const Seen &seen, int i, int warp,
                                    int lane, __half *rows, Counted<TILES> &counted,
                                    Accumulator<C, D> (&sums)[TILES])
{
    const int32_t *table = at.numbers_of(p, p.table);
    int turn = at.end - i; /* the warp after the one that had the last sealed page */
    bool any = false;
#pragma unroll 1
    for (; i < at.end; i += 32) {
        const int entry = i + lane < at.end ? __ldg(table + i + lane) : 0,
                  matrix = MANY && p.matrices && i + lane < at.end
                               ? __ldg(at.numbers_of(p, p.matrices) + i + lane)
                               : 0;
#pragma unroll 1
        for (uint32_t open = __ballot_sync(FULL, entry < 0 && entry != KVANT_CUDA_NO_BLOCK); open;
             open &= open - 1) {
            const int found = __ffs(open) - 1, block = -1 - __shfl_sync(FULL, entry, found),
                      before = PAGE_TOKENS * (i + found - at.first),
                      next = MANY && p.matrices
                                 ? at.matrices.tile_of(__shfl_sync(FULL, matrix, found))
                                 : 0;
            const Q &own = tile_at<D, MANY>(p, queries, next);
#pragma unroll 1
            for (int first = 0; first < PAGE_TOKENS; first += OPEN_TOKENS, turn++) {
                if (turn % WARPS != warp || before + first >= at.tokens)
                    continue;
                any = true;
                if (MANY && next != counted.tile)
                    counted.change(sums, own, next, lane);
                unrolled_for (int t = 0; t < TILES; t++)
                    sums[t] = attend_open_tokens<C, D, GENERAL, MANY, STAGED>(
                        p, own, seen, t, block, first, at.pair, at.skipped + before,
                        at.tokens - before, rows, lane, sums[t]);
            }
        }
    }
    return any;
}

template <class KC, class VC>
using ArgsOf =
    std::conditional_t<HAS_CHUNKS<KC> || HAS_CHUNKS<VC>, ChunkAttentionArgs,
                       std::conditional_t<HAS_WIDE_BOOK<KC>, WideAttentionArgs, AttentionArgs>>;

/* Tables of directions or pairs; the caller synchronises. */
template <class KC, class VC, int D, bool LARGE, class S>
KVANT_INLINE void fill_tables(uint8_t *tables, const ArgsOf<KC, VC> &p)
{
    if constexpr (HAS_CHUNKS<KC>)
        KC::fill(tables, p.k_directions, KC::template copies<LARGE, D, S::TILES>());
    if constexpr (HAS_CHUNKS<VC> && !S::ONE_TABLE)
        VC::fill(tables + S::K_TABLE, p.v_directions, VC::template copies<LARGE, D, S::TILES>());
    if constexpr (HAS_WIDE_BOOK<KC>)
        fill_wide_book<KC>(tables, p.k_levels);
    if constexpr (HAS_TRELLIS<KC>)
        fill_levels<KC, level_copies<KC, LARGE>()>(tables, p.k_bytes);
    if constexpr (HAS_TRELLIS<VC> && !S::ONE_TABLE)
        fill_levels<VC, level_copies<VC, LARGE>()>(tables + S::K_TABLE, p.v_bytes);
}

/* What unpacking of keys, or of values, needs: a codebook of bytes, or where the lane's copy of
 * a table is. */
template <class C, class KC, class VC, int D, bool LARGE, bool KEYS, class S>
KVANT_INLINE auto table_of(const uint8_t *tables, const ArgsOf<KC, VC> &p, int lane)
{
    const uint8_t *own = tables + (KEYS || S::ONE_TABLE ? 0 : S::K_TABLE);
    if constexpr (HAS_CHUNKS<C>)
        return chunk_table<C, C::template copies<LARGE, D, S::TILES>()>(
            own, KEYS ? p.k_directions : p.v_directions, lane);
    else if constexpr (HAS_WIDE_BOOK<C>)
        return wide_table(own, p.one, lane);
    else if constexpr (HAS_TRELLIS<C>)
        return level_table<C, level_copies<C, LARGE>()>(own, p.one, lane);
    else
        return bytes_of(KEYS ? p.k_bytes : p.v_bytes, p.one);
}

/* The warp's first page of the piece that has a new token; else the piece's end. */
template <int WARPS, class L, class P>
KVANT_INLINE int first_new_page(const NewTokens &newest, const L &lengths, const P &piece, int warp)
{
    auto cursor = piece.cursor;
#pragma unroll 1
    for (int i = piece.begin, end; i < piece.end; i = end) {
        cursor.seek(lengths, i);
        const int first = cursor.first + cursor.head(i) * cursor.pages,
                  page = first + (int)((__ldg(newest.cells + cursor.b) - newest.first -
                                        cursor.b * newest.stride) >>
                                       6);
        end = min(piece.end, first + cursor.pages);
        if (page >= i && page < end && (page - piece.begin) % WARPS == warp)
            return page;
    }
    return piece.end;
}

/* Asks for the warp's first pages, as far as they are older than the new tokens. */
template <class S, class L, class P, class F>
KVANT_INLINE void fill_old_pages(const AttentionArgs &p, const L &lengths, const P &piece, int end,
                                 int warp, F &feeder)
{
    const int ready = min(end, first_new_page<S::WARPS>(p.newest, lengths, piece, warp));
    for (int i = 0; i < (S::STAGES < 2 ? 1 : 2) && feeder.next < ready; i++)
        feeder.fill(p, lengths);
}

/* All thread blocks wait, because the next kernel may count on earlier kernels. */
template <class L>
KVANT_INLINE void wait_and_clear(const AttentionArgs &p, const L &lengths, bool any_empty,
                                 int head_dim)
{
    wait_for_prior();
    if (any_empty)
        clear_empty(p, lengths, head_dim);
}

/* Prepares the groups' numbers of a page of values: hybrid ones, and those of `valid` tokens. */
template <class VC, int D>
KVANT_INLINE void prepare_value_groups(const AttentionArgs &p, uint8_t *metadata, int valid,
                                       int lane)
{
    if (p.v_groups.hybrid)
        split_hybrid(metadata, p.v_groups, p.v_offset, lane);
    if (valid < PAGE_TOKENS)
        clear_scales<VC, D>(metadata, p.v_symmetric, p.v_groups, valid, lane);
}

/* Leaves the sums of a warp's pages of a stretch for the other warps, in its slot `used`. */
template <class S, class VC, int D>
KVANT_INLINE void leave_sums(const AttentionArgs &p, SharedMemory<S> &shared,
                             Accumulator<VC, D> (&sums)[S::TILES], bool any, int used,
                             int n_columns, int warp, int lane)
{
    unrolled_for (int t = 0; t < S::TILES; t++) {
        sums[t].finish(p.v_step, p.v_bias, lane);
        if (any)
            store_sums<VC, D>(sums[t], reinterpret_cast<float *>(shared.slots[warp][used]), t,
                              n_columns, lane);
        shared.results.put(warp, lane, any ? (warp * S::STAGES + used) * (S::SLOT / 4) : -1, t,
                           sums[t].max, sums[t].sum);
    }
}

/* OPEN: the table may name open blocks. MANY: keys may have several matrices, or centres.
 * GENERAL kernels are both, too. */
template <class KC, class VC, int D, bool LARGE, bool OPEN, bool MANY, bool GENERAL, int TILES,
          int BLOCKS>
KVANT_INLINE void attend(const ArgsOf<KC, VC> &p)
{
    using S = Shape<KC, VC, D, LARGE, TILES, BLOCKS>;
    using Memory = SharedMemory<S>;
    using L = Lengths<GENERAL, S::COLUMNS>;
    constexpr bool PLAIN = D <= 128 && !MANY && !GENERAL;
    extern __shared__ uint8_t raw[];
    Memory &shared = *reinterpret_cast<Memory *>(raw);
    /* the shuffle tells the compiler that the warp's number is the same in all its lanes */
    const int lane = threadIdx.x & 31, warp = __shfl_sync(FULL, threadIdx.x >> 5, 0);
    prefetch_arguments(p, warp);
    request_channels<D>(p);
    if (!p.table_ready)
        fill_tables<KC, VC, D, LARGE, S>(shared.tables, p);
    begin_next();
    if (!p.table_ready)
        wait_for_prior();
    const L lengths{ p };
    request_all<D>(p);
    const Piece<GENERAL> piece = find_piece(lengths, blockIdx.x, gridDim.x, S::WARPS, lane);
    Feeder<L, GENERAL, MANY, S::WARPS, S::STAGES, S::SLOT, S::K_BYTES, S::SPLIT> feeder;
    feeder.ring.init(shared.slots[warp][0], shared.barriers[warp], lane);
    feeder.start(p, lengths, piece, warp, shared.entries[warp], shared.matrices[warp]);
    feeder.find_pages(p);
    if (p.table_ready)
        feeder.ask(p);
    Stretch<GENERAL> at{};
    if (piece.begin < piece.end)
        at = stretch_from(lengths, piece, piece.cursor, piece.begin);
    if (!GENERAL && !feeder.ring.COUNTS && p.table_ready && p.newest.cells)
        fill_old_pages<S>(p, lengths, piece, at.end, warp, feeder);
    if (p.table_ready && !(OPEN && are_open(p, at, piece, lane))) /* while pages come */
        fill_tables<KC, VC, D, LARGE, S>(shared.tables, p);
    const bool idle = piece.begin == piece.end;
    at.matrices = Matrices{ 1 };
    if constexpr (MANY)
        if (!idle)
            at.matrices = find_matrices(p, at, piece.begin, lane);
    if ((GENERAL && idle) || piece.any_empty) {
        wait_and_clear(p, lengths, piece.any_empty, D);
        if (GENERAL && idle)
            return;
    }
    /* An idle block goes on without pages. So it brings the instructions after the last page into
     * the second-level cache before any block needs them. Since the kernel last ran, all weights of
     * a layer passed through that cache. */
    if (idle)
        at.pair.n_columns = p.heads_a_group;
    const auto k_table = table_of<KC, KC, VC, D, LARGE, true, S>(shared.tables, p, lane);
    const auto v_table = table_of<VC, KC, VC, D, LARGE, false, S>(shared.tables, p, lane);

    /* Pages on their way or in use. Two at first: with more, some warps would have all of theirs
     * before others have one. */
    int depth = feeder.ring.COUNTS || S::STAGES < 2 ? S::STAGES : 2;
    int slot = 0, mine = piece.begin + warp;
    uint32_t parity = 0;
#pragma unroll 1
    for (bool first_stretch = true;; first_stretch = false) {
        if constexpr (MANY && !GENERAL)
            if (p.block_centers.start) {
                if (!p.queries_ready)
                    wait_for_prior();
                const int from = max(piece.begin, at.first);
                put_offsets<D>(p, at.pair, at.page_of(from + warp), S::WARPS, at.page_of(at.end),
                               lane);
            }
        wait_for_prior(); /* of use in the first stretch alone */
        /* The first warps write the outputs of the stretch before: the last warps take most of the
         * queries. */
        const int worker = first_stretch ? warp : S::WARPS - 1 - warp;
        QueryRows<D, S::WARPS, GENERAL, S::COLUMNS, MANY> rows;
        rows.load(p, at.pair, at.matrices.first(), worker, lane);
        /* the slots of a warp without pages may take sums of open pages */
        if (feeder.next == piece.begin + warp && (!OPEN || piece.begin + warp < at.end) &&
            first_stretch)
            feeder.fill(p, lengths);
        prepare_tiles<KC, D, MANY>(p, at.pair, at.matrices, at.first_position, shared.queries, rows,
                                   worker, lane);
        __syncthreads();
        feeder.ring.fence_writes();
        __syncwarp();
        uint32_t q[TILES][key_tiles<KC, D>()][2];
        ScoreFactors<KC, D> factors[TILES];
        Accumulator<VC, D> sums[TILES];
        unrolled_for (int t = 0; t < TILES; t++)
            sums[t].clear();
        const Share share =
            idle ? idle_share(blockIdx.x) : share_of(piece, at.first, at.first + at.cursor.pages);
        const Seen seen = GENERAL ? seen_by_all(p, at.pair, at.first_position) : Seen{ 0, INT_MAX };
        bool any = false; /* the warp has sums of this stretch */
        Counted<TILES> counted;
        counted.begin();
        const uint4 *operands = reinterpret_cast<const uint4 *>(shared.queries.fixed);
        auto load_tile = [&](const typename S::Query &queries, int i) {
            unrolled_for (int t = 0; t < TILES; t++) {
                if constexpr (!S::RELOAD)
                    load_operands<KC, D>(queries, t, q[t], lane);
                factors[t] = score_factors<KC, D>(queries, t, lane, p.k_step, p.k_bias,
                                                  p.k_symmetric, p.k_offset);
            }
            if constexpr (MANY)
                counted.change(sums, queries, i, lane);
            counted.tile = i;
        };
#pragma unroll 1
        while (mine < at.end) {
            /* not sooner, because the last slot takes the warp's sums before it is filled again */
#pragma unroll 1
            while (feeder.next < mine + S::WARPS * depth)
                feeder.fill(p, lengths);
            depth = S::STAGES;
            any = true;
            uint8_t *page = shared.slots[warp][slot];
            const int32_t entry = OPEN ? shared.entries[warp][slot] : 0;
            const int next =
                MANY && p.matrices ? at.matrices.tile_of(shared.matrices[warp][slot]) : 0;
            if (next != counted.tile)
                load_tile(tile_at<D, MANY>(p, shared.queries, next), next);
            PageOffsets offsets;
            if constexpr (MANY && TILES == 1)
                offsets.ask(p, at.pair, at.page_of(mine), 0, lane);
            feeder.ring.wait(slot, parity);
            const int before = PAGE_TOKENS * (mine - at.first), valid = at.tokens - before,
                      first = at.skipped + before;
            if (!OPEN || entry >= 0) {
                float s[TILES][4][4];
                if constexpr (S::RELOAD)
                    unrolled_for (int t = 0; t < TILES; t++)
                        load_operands<KC, D>(tile_at<D, MANY>(p, shared.queries, counted.tile), t,
                                             q[t], lane);
                constexpr int k_codes = S::K_CODES, v_codes = S::V_CODES;
                if (KC::GROUP != KVANT_CUDA_GROUP_TOKEN && p.k_groups.hybrid) {
                    split_hybrid(page + k_codes, p.k_groups, p.k_offset, lane);
                    feeder.ring.fence_writes();
                }
                score_page<KC, D, S::BYTES, PLAIN>(page, k_codes, q, factors, k_table,
                                                   p.k_symmetric, p.k_offset, p.k_groups, lane, s,
                                                   operands);
                if constexpr (S::SPLIT) {
                    __syncwarp();
                    feeder.fill_keys(p, lengths, mine + S::WARPS < at.end);
                }
                if constexpr (GENERAL)
                    unrolled_for (int t = 0; t < TILES; t++)
                        change_scores(p, shared.queries, seen, t, first, valid, lane, s[t]);
                if (MANY && p.page_offsets)
                    unrolled_for (int t = 0; t < TILES; t++) {
                        if constexpr (TILES > 1)
                            offsets.ask(p, at.pair, at.page_of(mine), t, lane);
                        offsets.add(p, s[t]);
                    }
                if constexpr (S::SPLIT)
                    feeder.ring.wait_values(slot, parity);
                if (VC::GROUP != KVANT_CUDA_GROUP_TOKEN &&
                    (p.v_groups.hybrid || valid < PAGE_TOKENS)) {
                    prepare_value_groups<VC, D>(p, page + S::K_BYTES + v_codes, valid, lane);
                    feeder.ring.fence_writes();
                }
                add_page<VC, D, PLAIN>(page + S::K_BYTES, v_codes, v_table, p.v_symmetric,
                                       p.v_offset, p.v_groups, lane, valid, s, sums);
            }
            __syncwarp();
            mine += S::WARPS;
            if (++slot == S::STAGES)
                slot = 0, parity ^= 1;
        }
        const int used = slot == 0 ? S::STAGES - 1
                                   : slot - 1; /* of the last page: nothing is on its way there */
        if constexpr (OPEN)
            any |= attend_open_pages<VC, D, GENERAL, MANY, S::STAGED, S::WARPS>(
                p, shared.queries, at, seen, max(piece.begin, at.first), warp, lane,
                reinterpret_cast<__half *>(shared.slots[warp][used]), counted, sums);
        if constexpr (MANY)
            counted.end(sums);
        leave_sums<S>(p, shared, sums, any, used, at.pair.n_columns, warp, lane);
        __syncthreads();
        finish_pair<D, GENERAL>(p, shared.results, reinterpret_cast<const float *>(shared.slots),
                                at.pair, share, !idle, warp, lane);
        if (idle || at.end == piece.end)
            break;
        at = stretch_from(lengths, piece, at.cursor, at.end);
        if constexpr (MANY)
            at.matrices = find_matrices(p, at, max(piece.begin, at.first), lane);
    }
}

/* Large shapes have a body for compute_90 and later only. They have none in code for 12.0 and 12.1,
 * whose blocks have 99 KB of shared memory. launch.cu reads ptx_least and shared_least, and never
 * launches an empty body. The trap makes sure that such a launch could not return a result. */
constexpr int LARGE_PTX = 90;

/* arch: __CUDA_ARCH__ */
__host__ __device__ constexpr bool has_large_shapes(int arch)
{
    return arch >= 10 * LARGE_PTX && arch / 100 != 12;
}

template <class KC, class VC, int D, bool LARGE, bool OPEN, bool MANY, bool GENERAL, int TILES,
          int BLOCKS>
__global__ void __launch_bounds__(Shape<KC, VC, D, LARGE, TILES, BLOCKS>::WARPS * 32, BLOCKS)
    attention_kernel(const __grid_constant__ ArgsOf<KC, VC> p)
{
#ifdef __CUDA_ARCH__
    if constexpr (!LARGE || has_large_shapes(__CUDA_ARCH__))
        attend<KC, VC, D, LARGE, OPEN, MANY, GENERAL, TILES, BLOCKS>(p);
    else
        __trap();
#endif
}

template <class KC, class VC, int D, bool LARGE, bool OPEN, bool MANY, bool GENERAL, int TILES,
          int BLOCKS = 1>
AttentionKernel kernel_of()
{
    using S = Shape<KC, VC, D, LARGE, TILES, BLOCKS>;
    constexpr size_t bytes = sizeof(SharedMemory<S>);
    static_assert(bytes <= S::BYTES_A_BLOCK, "a block's memory");
    return AttentionKernel{
        (const void *)attention_kernel<KC, VC, D, LARGE, OPEN, MANY, GENERAL, TILES, BLOCKS>,
        S::WARPS * 32,
        (int)bytes,
        LARGE ? LARGE_BYTES : 0,
        S::COLUMNS,
        S::BYTES,
        LARGE ? LARGE_PTX : 0,
        BLOCKS,
        MANY && !GENERAL
    };
}

/* The pair of `balanced` has a kernel with two blocks on a multiprocessor. With many pairs of
 * sequences and kv heads, one block computes while the other one ends a pair. */
template <class KC, class VC, int D>
constexpr bool HAS_TWO_BLOCKS =
    std::is_same<KC, Trellis4>::value && std::is_same<VC, Trellis4>::value && D == 128;

/* In large shapes, one query token without masks has kernels of its own: general kernels are up
 * to 10 % slower (octopus 20 %), and those of several matrices 2 %. A kernel without open pages
 * saves another 2 to 4 %. It exists for pairs of a kind with itself; other pairs, and groups,
 * which need open pages, are not worth the compilation time. */
template <class KC, class VC, int D> AttentionKernel kernel_for(KernelChoice choice)
{
    constexpr bool RARE = is_rare<KC, VC>();
    if (choice.wide) {
        if constexpr (most_tiles<KC, VC, D>() > 1)
            return choice.large ? kernel_of<KC, VC, D, true, true, true, true, 2>()
                                : kernel_of<KC, VC, D, false, true, true, true, 2>();
        return AttentionKernel{};
    }
    if constexpr (HAS_TWO_BLOCKS<KC, VC, D>)
        if (choice.large && !choice.general && !choice.many && choice.two_blocks)
            return kernel_of<KC, VC, D, true, true, false, false, 1, 2>();
    if constexpr (!RARE && std::is_same<KC, VC>::value && KC::GROUP == KVANT_CUDA_GROUP_TOKEN)
        if (choice.large && !choice.general && !choice.many && !choice.open)
            return kernel_of<KC, VC, D, true, false, false, false, 1>();
    if constexpr (HAS_WIDE_BOOK<KC> && !HAS_TRELLIS<VC>) /* in vLLM, which has no open pages */
        if (choice.large && !choice.general && !choice.many && !choice.open)
            return kernel_of<KC, VC, D, true, false, false, false, 1>();
    if constexpr (!RARE)
        if (choice.large && !choice.general)
            return choice.many ? kernel_of<KC, VC, D, true, true, true, false, 1>()
                               : kernel_of<KC, VC, D, true, true, false, false, 1>();
    return choice.large ? kernel_of<KC, VC, D, true, true, true, true, 1>()
                        : kernel_of<KC, VC, D, false, true, true, true, 1>();
}

} // namespace kvant
