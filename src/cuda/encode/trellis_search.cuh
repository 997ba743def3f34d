/* trellis_search.cuh - finds a row's path through the trellis. One warp runs the search of
 * format.md ("Trellis codes") with the CPU's integers, so it finds the same path as the CPU.
 *
 * Shared memory holds the metrics of all states twice, before and after a step, two metrics per
 * word. A lane advances states i, i + 1, i + S / 2 and i + S / 2 + 1 to states 2 i ... 2 i + 3. It
 * reads two words and writes two words, and works on 16-bit numbers. Subsets are parities, so the
 * subsets of a lane's states differ by constants. The subset of i + 1 is the subset of i changed by
 * 4, so one word holds the costs of both. One bit per new state records its predecessor. */
#pragma once

#include "../trellis/trellis.cuh"
#include "../trellis/trellis_steps.cuh"

namespace kvant
{

/* As on the CPU (codec/trellis_book.c, kernels/trellis.h, kernels/trellis_path_template.h), because
 * bytes depend on them. */
constexpr int CELLS = 512, CELLS_PER_DEVIATION = 64;
constexpr uint32_t MAX_COST = 8191;
constexpr int WARM_UP = 32, LOWER_STEPS = 16, PATH_TRIES = 4;

/* The levels in units of cells, of which a level and a standard deviation have 64; and the levels
 * as numbers. */
struct TrellisLevels {
    alignas(16) float scaled[KVANT_CUDA_TRELLIS_LEVELS];
    float values[KVANT_CUDA_TRELLIS_LEVELS];

    /* Called by the first threads of a block. */
    KVANT_INLINE void load(const kvant_cuda_trellis &trellis)
    {
        if (threadIdx.x < KVANT_CUDA_TRELLIS_LEVELS) {
            scaled[threadIdx.x] = (float)(CELLS_PER_DEVIATION * trellis.levels[threadIdx.x]);
            values[threadIdx.x] = trellis.values[threadIdx.x];
        }
    }
};

/* Word z: the cost of subset z, and in the upper half the cost of subset z ^ 4. */
struct CostWords {
    uint4 at[2];
};

struct CellCosts {
    CostWords at[CELLS];
};

/* Computes costs from the distances to the nearest levels, which are whole numbers. most: the
 * largest cost. */
KVANT_INLINE CostWords costs_of(const float (&away)[8], uint32_t bits, uint32_t &most)
{
    uint32_t error[8], least = 0xffffffffu, word[4];
    most = 0;
    unrolled_for (int z = 0; z < 8; z++) {
        error[z] = __float_as_uint(__fadd_rn(away[z], 8388608.0f)) &
                   0x7fffff; /* 2^23: the mantissa's low bits */
        error[z] *= error[z];
        least = min(least, error[z]);
    }
    unrolled_for (int z = 0; z < 8; z++) {
        error[z] = min((error[z] - least) >> (18 - 2 * bits), MAX_COST);
        most = max(most, error[z]);
    }
    unrolled_for (int z = 0; z < 4; z++)
        word[z] = prmt(error[z], error[z + 4], 0x5410);
    return CostWords{ make_uint4(word[0], word[1], word[2], word[3]),
                      make_uint4(prmt(word[0], 0, 0x1032), prmt(word[1], 0, 0x1032),
                                 prmt(word[2], 0, 0x1032), prmt(word[3], 0, 0x1032)) };
}

/* Computes the costs of N cells; use(i, words, most) receives them. */
template <int N, class F>
KVANT_INLINE void costs_of_cells(const TrellisLevels &levels, const kvant_cuda_trellis &trellis,
                                 const int (&cells)[N], F &&use)
{
    float x[N], away[N][8];
    unrolled_for (int j = 0; j < N; j++) {
        x[j] = (float)((cells[j] - CELLS / 2) * trellis.per_deviation);
        unrolled_for (int z = 0; z < 8; z++)
            away[j][z] = 1e9f;
    }
#pragma unroll 1
    for (uint32_t i = 0; i < trellis.n_levels; i += 8) {
        const float4 low = *reinterpret_cast<const float4 *>(levels.scaled + i),
                     high = *reinterpret_cast<const float4 *>(levels.scaled + i + 4);
        const float level[8] = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
        unrolled_for (int j = 0; j < N; j++)
            unrolled_for (int z = 0; z < 8; z++)
                away[j][z] = fminf(away[j][z], fabsf(__fsub_rn(x[j], level[z])));
    }
    unrolled_for (int j = 0; j < N; j++) {
        uint32_t most;
        const CostWords words = costs_of(away[j], trellis.bits, most);
        use(j, words, most);
    }
}

/* Called by all threads of a block. */
KVANT_INLINE void fill_costs(CellCosts &costs, const TrellisLevels &levels,
                             const kvant_cuda_trellis &trellis)
{
    for (int cell = threadIdx.x; cell < CELLS; cell += blockDim.x) {
        const int cells[1] = { cell };
        costs_of_cells(levels, trellis, cells,
                       [&](int, const CostWords &words, uint32_t) { costs.at[cell] = words; });
    }
}

KVANT_INLINE int cell_of(float u)
{
    const float x = rintf(__fmul_rn(u, (float)CELLS_PER_DEVIATION));
    return (int)fminf(fmaxf(x, -CELLS / 2), CELLS / 2 - 1) + CELLS / 2;
}

/* The nearest level to a cell in a subset, as its number / 8. */
KVANT_INLINE uint32_t nearest_of(const kvant_cuda_trellis &trellis, const TrellisLevels &levels,
                                 int cell, uint32_t subset)
{
    const float x = (float)((cell - CELLS / 2) * trellis.per_deviation);
    float least = 1e9f;
    uint32_t nearest = 0;
#pragma unroll 2
    for (uint32_t i = 0; i < trellis.n_levels / 8; i++) {
        const float away = fabsf(__fsub_rn(x, levels.scaled[8 * i + subset]));
        nearest = away < least ? i : nearest;
        least = fminf(least, away);
    }
    return nearest;
}

__host__ __device__ constexpr uint32_t odd_parity(uint32_t x)
{
    x ^= x >> 16, x ^= x >> 8, x ^= x >> 4;
    return 0x6996u >> (x & 15) & 1;
}

/* The subset of a window of memory + 1 bits. */
template <int M> __host__ __device__ constexpr uint32_t subset_of_window(uint32_t window)
{
    return odd_parity(window & trellis_tap(M, 0)) | odd_parity(window & trellis_tap(M, 1)) << 1 |
           odd_parity(window & trellis_tap(M, 2)) << 2;
}

/* A warp's memory. */
template <int D, int M> struct SearchSpace {
    /* an item is four states of a lane */
    static constexpr int STATES = 1 << M, ITEMS = STATES / 128;
    static constexpr int WORDS = (ITEMS + 7) / 8; /* words of a lane's decisions per step */
    using Decisions = typename std::conditional<(M == 8), uint8_t, uint32_t>::type;
    alignas(16) uint32_t metric[2][STATES / 2];
    uint16_t cells[D];
    uint8_t bits[D];
    /* has to be last, so that searches with fewer steps may have less memory */
    Decisions decisions[D][WORDS][32];
};

template <int D, int M> struct Search {
    using S = SearchSpace<D, M>;
    static constexpr int HALF = S::STATES / 2;
    S &space;
    const CostWords *costs; /* costs of cells */
    /* n: number of steps, at most D; room: number of steps for which decisions fit into memory */
    int lane, n, room;
    int kept;     /* first step of the stretch whose decisions are stored */
    uint32_t own; /* subset of the window 4 lane */

    __device__ Search(S &space_, const CostWords *costs_, int lane_, int n_ = D, int room_ = D)
        : space(space_), costs(costs_), lane(lane_), n(n_), room(room_), kept(0),
          own(subset_of_window<M>(4 * lane_))
    {
    }

    /* Advances one step and returns the least of the lane's new metrics, in two halves. lower:
     * subtracted from the metrics before. */
    KVANT_INLINE uint32_t advance(int from, const uint32_t (&costs_of_cell)[4], uint32_t lower,
                                  typename S::Decisions *decisions)
    {
        const uint32_t *before = space.metric[from];
        uint32_t *after = space.metric[1 - from];
        uint32_t cost[8], flags[S::WORDS] = {}, least = 0xffffffffu, word[S::ITEMS][2];
        unrolled_for (int k = 0; k < S::ITEMS;
                      /* loaded before any store, because the compiler would wait for the store */
                      k++)
            word[k][0] = before[32 * k + lane], word[k][1] = before[HALF / 2 + 32 * k + lane];
        unrolled_for (int z = 0; z < 4; z++) {
            cost[z] = costs_of_cell[z];
            cost[z + 4] = prmt(cost[z], 0, 0x1032);
        }
        unrolled_for (int k = 0; k < S::ITEMS; k++) {
            constexpr uint32_t SWAP = 2;
            const uint32_t z = subset_of_window<M>(128 * k), near = cost[z], far = cost[z ^ SWAP];
            const uint32_t first = word[k][0] - lower, second = word[k][1] - lower;
            /* at most 65535: min(a, 65535 - b) + b */
            const uint32_t low0 = __vminu2(first, ~near) + near,
                           high0 = __vminu2(second, ~far) + far;
            const uint32_t low1 = __vminu2(first, ~far) + far,
                           high1 = __vminu2(second, ~near) + near;
            /* whether the path from i (i + 1) is at least as good */
            bool first0, second0, first1, second1;
            const uint32_t even = __vibmin_u16x2(low0, high0, &second0, &first0),
                           odd = __vibmin_u16x2(low1, high1, &second1, &first1);
            const uint32_t taken =
                (first0 ? 0 : 1u) | (second0 ? 0 : 2u) | (first1 ? 0 : 4u) | (second1 ? 0 : 8u);
            flags[k / 8] |= taken << 4 * (k % 8);
            least = __vminu2(least, __vminu2(even, odd));
            *reinterpret_cast<uint2 *>(after + 64 * k + 2 * lane) =
                make_uint2(prmt(even, odd, 0x5410), prmt(even, odd, 0x7632));
        }
        if (decisions)
            unrolled_for (int w = 0; w < S::WORDS; w++)
                decisions[32 * w + lane] = (typename S::Decisions)flags[w];
        return least;
    }

    /* Loads the costs of subsets 0 to 3, combined with the lane's subset. */
    KVANT_INLINE void load_costs(int at, uint32_t (&cost)[4])
    {
        const uint32_t *row = reinterpret_cast<const uint32_t *>(costs + space.cells[at]);
        unrolled_for (int z = 0; z < 4; z++)
            cost[z] = row[z ^ own];
    }

    /* The state from which all paths begin; ANY_STATE: all states. */
    static constexpr uint32_t ANY_STATE = S::STATES;

    KVANT_INLINE void start(uint32_t state)
    {
        unrolled_for (int i = 0; i < HALF / 32; i++) {
            const uint32_t word = 32 * i + lane, only = state & 1 ? 0x0000ffffu : 0xffff0000u;
            space.metric[0][word] = state == ANY_STATE ? 0 : word == state / 2 ? only : 0xffffffffu;
        }
        __syncwarp();
    }

    /* Runs the steps from -before to the end of the stretch that begins with step `first`, and
     * keeps the stretch's decisions. Returns the index of the last step's metrics. */
    KVANT_INLINE int pass(uint32_t state, int before, int first)
    {
        start(state);
        kept = first;
        const int end = before + min(n, kept + room);
        int at = before ? (n - before % n) % n : 0, from = 0;
        uint32_t lower = 0, cost[4], next_cost[4];
        load_costs(at, next_cost);
#pragma unroll 1
        for (int step = 0; step < end; step++) {
            const int next = at + 1 == n ? 0 : at + 1;
            unrolled_for (int z = 0; z < 4; z++)
                cost[z] = next_cost[z];
            load_costs(next, next_cost); /* loaded early */
            const uint32_t least = advance(
                from, cost, lower, step < before + kept ? nullptr : space.decisions[at - kept][0]);
            lower = 0;
            if ((step + 1) % LOWER_STEPS == 0) {
                const uint32_t smaller = min(least & 0xffffu, least >> 16);
                lower = __reduce_min_sync(FULL, smaller) * 0x10001u;
            }
            at = next;
            from = 1 - from;
            __syncwarp();
        }
        return from;
    }

    /* The state with the least metric. Lowering does not change it. */
    KVANT_INLINE uint32_t best_state(int from)
    {
        uint32_t best = 0xffffffffu;
        unrolled_for (int i = 0; i < HALF / 32; i++) {
            const uint32_t pair = space.metric[from][32 * i + lane], state = 2 * (32 * i + lane);
            best = min(best, min((pair & 0xffffu) << 12 | state, pair >> 16 << 12 | (state + 1)));
        }
        return __reduce_min_sync(FULL, best) & (S::STATES - 1);
    }

    /* Follows the path that ends in a state back to step 0, and returns the state before it. begin,
     * before: arguments of the pass. The pass is repeated for each stretch that does not fit into
     * memory. */
    KVANT_INLINE uint32_t trace(uint32_t state, uint32_t begin, int before)
    {
#pragma unroll 1
        for (int first = last_stretch(); first >= 0; first -= room) {
            if (first != kept)
                pass(begin, before, first);
#pragma unroll 4
            for (int step = min(n, first + room) - 1; step >= first; step--) {
                const uint32_t u = state & 1, i = state >> 1, item = i / 64 % S::ITEMS,
                               bit = 4 * (item % 8) + 2 * u + (i & 1);
                if (lane == 0)
                    space.bits[step] = (uint8_t)u;
                state =
                    i | ((uint32_t)space.decisions[step - first][item / 8][i / 2 % 32] >> bit & 1) *
                            HALF;
            }
        }
        return state;
    }

    KVANT_INLINE int last_stretch() const
    {
        return room >= n ? 0 : (n - 1) / room * room;
    }

    /* Fills bits from cells. */
    KVANT_INLINE void find()
    {
        uint32_t end = best_state(pass(ANY_STATE, WARM_UP, last_stretch()));
        bool found = false;
#pragma unroll 1
        for (int tries = 0; !found && tries < PATH_TRIES; tries++) {
            const uint32_t begin = trace(end, ANY_STATE, WARM_UP);
            found = begin == end;
            end = begin;
        }
        if (!found) {
            pass(end, 0, last_stretch());
            trace(end, end, 0);
        }
        __syncwarp();
    }
};

} // namespace kvant
