/* trellis_search.cuh - the search through the trellis (format.md, "Trellis codes"). A warp searches
 * several rows at once, with the CPU's integers, so it finds the same paths as the CPU.
 *
 * A new state takes the place of a state before it. The numbers of both states differ in the bit
 * that leaves the window and in the bit that enters it, and the place's index has one bit for both.
 * Step t of 6 uses bit t of the place, so after 6 steps a place is their bits, with the oldest bit
 * lowest. 8 lanes share a row, and a lane has places 8 lane ... 8 lane + 7 in registers. Three of
 * the 6 steps stay within its registers. Three steps exchange metrics with the lane whose number
 * differs in one bit.
 *
 * A register holds the metric and, in its low 8 bits, the place of the path before the 6 steps,
 * called its origin. So a minimum also selects the path, and among equal metrics the first one,
 * because origins differ in the step's bit and below. Origins are stored once for 6 steps, and a
 * trace goes back 6 steps by one look-up. */
#pragma once

#include "../trellis/trellis.cuh"
#include "../trellis/trellis_steps.cuh"

namespace kvant
{

/* As on the CPU (codec/trellis_book.c, kernels/trellis.h), because bytes depend on them. */
constexpr int CELLS = 512, CELLS_PER_DEVIATION = 64;
constexpr uint32_t MAX_COST = 4095;
constexpr int WARM_UP = 24, PATH_TRIES = 4;

constexpr int PLACE_STEPS = TRELLIS_MEMORY, PLACES = 1 << PLACE_STEPS;
constexpr int WARM_UP_GROUPS = WARM_UP / PLACE_STEPS;
static_assert(WARM_UP % PLACE_STEPS == 0, "whole groups before step 0");

KVANT_INLINE int cell_of(float u)
{
    const float x = rintf(__fmul_rn(u, (float)CELLS_PER_DEVIATION));
    return (int)fminf(fmaxf(x, -CELLS / 2), CELLS / 2 - 1) + CELLS / 2;
}

/* The parity of the bits of a window that a tap selects. The window's oldest bit is the lowest. */
template <uint32_t TAP, int J = 0> __host__ __device__ constexpr uint32_t parity_of(uint32_t window)
{
    if constexpr (TAP >> J == 0)
        return 0;
    else if constexpr ((TAP >> J & 1) != 0)
        return (window >> (TRELLIS_MEMORY - J) ^ parity_of<TAP, J + 1>(window)) & 1;
    else
        return parity_of<TAP, J + 1>(window);
}

__host__ __device__ constexpr uint32_t subset_of_path(uint32_t window)
{
    return parity_of<trellis_tap(0)>(window) | parity_of<trellis_tap(1)>(window) << 1 |
           parity_of<trellis_tap(2)>(window) << 2;
}

/* The subset of a place at step T. The step's own bit is both the newest and the oldest bit of the
 * window. If a path keeps it, their effects cancel each other; otherwise the subset changes by
 * 2. */
template <int T> __host__ __device__ constexpr uint32_t subset_of_place(uint32_t place)
{
    place &= ~(1u << T);
    /* rotated so that bit j of the place becomes bit 6 - (T - j) of the window */
    return subset_of_path((place << PLACE_STEPS | place) >> T & (2 * PLACES - 1));
}

/* The costs and the nearest levels of all cells. Costs are shifted above the origins. The words of
 * a cell are in the order of subsets 0 2 1 3 4 6 5 7, because the subsets of both paths to a place
 * differ by 2. `nearest` has 4 bits for each subset: the number of the nearest level, divided by
 * 8. */
struct CellTable {
    uint4 costs[CELLS][2];
    uint32_t nearest[CELLS];
    float values[KVANT_CUDA_TRELLIS_LEVELS];             /* of levels, in standard deviations */
    alignas(16) float levels[KVANT_CUDA_TRELLIS_LEVELS]; /* in cells */

    /* Distances are whole numbers below 2^15. A register holds 8 times the distance to a level plus
     * the level's number / 8, so the first of the nearest levels has the least one. */
    KVANT_INLINE void fill_cell(const kvant_cuda_trellis &trellis, int cell)
    {
        const float x = (float)((cell - CELLS / 2) * trellis.per_deviation);
        float away[8];
        uint32_t error[8], all = 0, least = 0xffffffffu;
        unrolled_for (int z = 0; z < 8; z++)
            away[z] = 1e9f;
#pragma unroll 2
        for (uint32_t i = 0; i < trellis.n_levels / 8; i++) {
            const float4 low = *reinterpret_cast<const float4 *>(levels + 8 * i),
                         high = *reinterpret_cast<const float4 *>(levels + 8 * i + 4);
            const float level[8] = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
            unrolled_for (int z = 0; z < 8; z++)
                away[z] = fminf(away[z], __fmaf_rn(fabsf(x - level[z]), 8, (float)i));
        }
        unrolled_for (int z = 0; z < 8; z++) {
            const uint32_t number = (uint32_t)away[z];
            all |= (number & 7) << 4 * z;
            error[z] = (number >> 3) * (number >> 3);
            least = min(least, error[z]);
        }
        unrolled_for (int z = 0; z < 8; z++)
            error[z] = min((error[z] - least) >> (18 - 2 * trellis.bits), MAX_COST) << 8;
        costs[cell][0] = make_uint4(error[0], error[2], error[1], error[3]);
        costs[cell][1] = make_uint4(error[4], error[6], error[5], error[7]);
        nearest[cell] = all;
    }

    /* Called by all threads of a block. */
    KVANT_INLINE void fill(const kvant_cuda_trellis &trellis)
    {
        for (uint32_t i = threadIdx.x; i < KVANT_CUDA_TRELLIS_LEVELS; i += blockDim.x) {
            values[i] = trellis.values[i];
            levels[i] = (float)(CELLS_PER_DEVIATION * trellis.levels[i]);
        }
        __syncthreads();
#pragma unroll 1
        for (int cell = (int)threadIdx.x; cell < CELLS; cell += (int)blockDim.x)
            fill_cell(trellis, cell);
    }

    KVANT_INLINE uint32_t nearest_of(int cell, uint32_t subset) const
    {
        return nearest[cell] >> 4 * subset & 7;
    }
};

/* The memory of a warp that searches ROWS rows of at most STEPS steps. Steps are in groups of 6,
 * from WARM_UP steps before step 0 on; the last group may be shorter. */
template <int STEPS, int ROWS> struct PathSpace {
    static constexpr int MOST_STEPS = STEPS, MOST_ROWS = ROWS,
                         GROUPS = (STEPS + PLACE_STEPS - 1) / PLACE_STEPS;
    alignas(16) uint8_t from[GROUPS][ROWS][PLACES]; /* origins */
    /* by group, 8 each: where the costs of steps are in CellTable::costs, in bytes */
    alignas(16) uint16_t costs[ROWS][(WARM_UP_GROUPS + GROUPS) * 8];
    /* path[i + 1]: the bits of group i; path[0]: of the 6 steps before step 0 */
    uint8_t path[ROWS][GROUPS + 1];

    /* The place of a step in `costs`. Steps before step 0 are negative. */
    KVANT_INLINE static int position_of(int step)
    {
        const int at = WARM_UP + step;
        return at / PLACE_STEPS * 8 + at % PLACE_STEPS;
    }

    KVANT_INLINE void put_cell(int row, int position, int cell)
    {
        costs[row][position] = (uint16_t)(cell * sizeof(uint4[2]));
    }

    KVANT_INLINE int cell_at(int row, int position) const
    {
        return costs[row][position] / (int)sizeof(uint4[2]);
    }

    /* Reads the trellis bit and the subset of a step. */
    KVANT_INLINE void read(int row, int position, uint32_t &bit, uint32_t &subset) const
    {
        const uint8_t *group = path[row] + position / 8 - WARM_UP_GROUPS;
        const uint32_t window =
            (group[0] | group[1] << PLACE_STEPS) >> position % 8 & (2 * PLACES - 1);
        bit = window >> PLACE_STEPS;
        subset = subset_of_path(window);
    }
};

template <class S> struct PathSearch {
    static constexpr int FIRST = 3,             /* bits FIRST and above of a place are the lane */
        OWN = 1 << FIRST, LANES = PLACES / OWN; /* places of a lane, lanes of a row */
    /* FAR: larger than all sums of costs */
    static constexpr uint32_t ANY_PLACE = PLACES, FAR = 0x80000000u;
    static_assert(S::MOST_ROWS <= 32 / LANES, "lanes for all rows");
    static_assert((uint64_t)(S::MOST_STEPS + WARM_UP) * MAX_COST << 8 < FAR, "sums of costs");
    S &space;
    const uint8_t *costs;
    int row, own; /* own: index of the lane within its row */
    int leader;   /* the lane that traces the row's paths */
    bool leads;
    int whole, rest; /* number of groups of 6 steps, and steps in the last group */
    uint32_t metric[OWN];
    /* for each step of a group: the lane's costs within the costs of a cell, in bytes */
    uint32_t at[PLACE_STEPS];

    /* Searches rows first_row to end_row - 1. Lanes beyond them repeat the last row. */
    __device__ PathSearch(S &space_, const CellTable &table, int lane, int first_row, int end_row,
                          int n_steps = S::MOST_STEPS)
        : space(space_), costs(reinterpret_cast<const uint8_t *>(table.costs)),
          row(min(first_row + lane / LANES, end_row - 1)), own(lane % LANES),
          leader(LANES * (row - first_row)), leads(lane == leader), whole(n_steps / PLACE_STEPS),
          rest(n_steps % PLACE_STEPS)
    {
        find_costs<0>();
    }

    /* Fills `at` for steps T to 5. */
    template <int T> KVANT_INLINE void find_costs()
    {
        const uint32_t z = subset_of_place<T>((uint32_t)own << FIRST);
        at[T] = 8 * (z & 1) + 4 * (z & 4);
        if constexpr (T + 1 < PLACE_STEPS)
            find_costs<T + 1>();
    }

    /* The bits of a subset that bits first .. end - 1 of a place change at step T. */
    template <int T> __host__ __device__ static constexpr uint32_t changed(int first, int end)
    {
        uint32_t all = 0;
        for (int bit = first; bit < end; bit++)
            all |= subset_of_place<T>(1u << bit);
        return all;
    }

    /* Fills cost[z] and cost[z ^ 2] for the subsets z without bit 1 that registers have at step T,
     * combined with the subset of the lane's bits. */
    template <int T> KVANT_INLINE void load_costs(const uint8_t *cell, uint32_t (&cost)[8]) const
    {
        constexpr uint32_t here = changed<T>(0, FIRST), lanes = changed<T>(FIRST, PLACE_STEPS);
        static_assert((here & lanes & 1) == 0, "words of subsets 0 to 3 are in the lane's order");
        unrolled_for (uint32_t far = 0; far <= (here & 4); far += 4) {
            const uint8_t *from = cell + (at[T] ^ 4 * far);
            if constexpr ((here & 1) != 0) {
                const uint4 w = *reinterpret_cast<const uint4 *>(from);
                cost[far] = w.x, cost[far ^ 2] = w.y, cost[far ^ 1] = w.z, cost[far ^ 3] = w.w;
            } else {
                const uint2 w = *reinterpret_cast<const uint2 *>(from);
                cost[far] = w.x, cost[far ^ 2] = w.y;
            }
        }
    }

    template <int T> KVANT_INLINE void advance(const uint8_t *cell)
    {
        uint32_t cost[8] = {}, other[OWN];
        load_costs<T>(cell, cost);
        unrolled_for (int q = 0; q < OWN; q++)
            other[q] = T < FIRST ? metric[q ^ (1 << T & (OWN - 1))]
                                 : __shfl_xor_sync(FULL, metric[q], 1 << T >> FIRST);
        unrolled_for (int q = 0; q < OWN; q++) {
            const uint32_t z = subset_of_place<T>(q);
            metric[q] = __viaddmin_u32(other[q], cost[z ^ 2], metric[q] + cost[z]);
        }
    }

    /* Advances steps T to n - 1 of a group. */
    template <int T = 0> KVANT_INLINE void advance_steps(const uint4 &cells, int n)
    {
        if constexpr (T < PLACE_STEPS) {
            if (T >= n)
                return;
            const uint32_t pair = T / 2 == 0 ? cells.x : T / 2 == 1 ? cells.y : cells.z;
            advance<T>(costs + (T % 2 ? pair >> 16 : pair & 0xffffu));
            advance_steps<T + 1>(cells, n);
        }
    }

    /* Advances n steps, and stores the origins of a group that is not before step 0. */
    KVANT_INLINE void advance_group(const uint4 &cells, int n, int group)
    {
        unrolled_for (int i = 0; i < OWN / 4; i++) {
            const uint32_t four =
                (uint32_t)own * (OWN * 0x01010101u) + 0x03020100u + i * 0x04040404u;
            unrolled_for (int k = 0; k < 4; k++)
                metric[4 * i + k] = prmt(metric[4 * i + k], four, 0x3214 + k);
        }
        advance_steps(cells, n);
        if (group < 0)
            return;
        uint32_t word[OWN / 4];
        unrolled_for (int i = 0; i < OWN / 4; i++)
            word[i] = prmt(prmt(metric[4 * i], metric[4 * i + 1], 0x40),
                           prmt(metric[4 * i + 2], metric[4 * i + 3], 0x40), 0x5410);
        unrolled_for (int i = 0; i < OWN / 4; i += 2)
            *reinterpret_cast<uint2 *>(space.from[group][row] + OWN * own + 4 * i) =
                make_uint2(word[i], word[i + 1]);
    }

    KVANT_INLINE uint4 cells_of(int group) const
    {
        return *reinterpret_cast<const uint4 *>(space.costs[row] + 8 * (WARM_UP_GROUPS + group));
    }

    /* Runs the groups from `first` on, from all places or from one place of the row. */
    KVANT_INLINE void pass(int first, uint32_t begin)
    {
        unrolled_for (int q = 0; q < OWN; q++)
            metric[q] = begin == ANY_PLACE || begin == (uint32_t)(OWN * own + q) ? 0 : FAR;
        __syncwarp(); /* the preceding trace has read its origins */
        uint4 cells = cells_of(first);
#pragma unroll 1
        for (int group = first; group < whole; group++) {
            const uint4 next = cells_of(min(group + 1, S::GROUPS - 1));
            advance_group(cells, PLACE_STEPS, group);
            cells = next;
        }
        if (rest)
            advance_group(cells, rest, whole);
        __syncwarp();
    }

    /* The last place of a path whose last 6 bits are these: where steps end within a group, the
     * bits of its first steps are the newest. */
    KVANT_INLINE uint32_t last_place(uint32_t bits) const
    {
        return (bits << rest | bits >> (PLACE_STEPS - rest)) & (PLACES - 1);
    }

    /* The inverse of last_place, and the state with these bits, whose newest bit is the lowest. */
    KVANT_INLINE uint32_t bits_of(uint32_t place) const
    {
        return (place >> rest | place << (PLACE_STEPS - rest)) & (PLACES - 1);
    }

    KVANT_INLINE static uint32_t reversed(uint32_t bits)
    {
        return __brev(bits) >> (32 - PLACE_STEPS);
    }

    /* The last bits of the row's best path. Among equal metrics this is the lowest state. */
    KVANT_INLINE uint32_t best_bits() const
    {
        uint32_t best = 0xffffffffu;
        unrolled_for (int q = 0; q < OWN; q++)
            best = min(best, (metric[q] & ~255u) | reversed(bits_of(OWN * own + q)));
        unrolled_for (int k = 1; k < LANES; k *= 2)
            best = min(best, __shfl_xor_sync(FULL, best, k));
        return reversed(best & 255);
    }

    /* Follows the row's path with these last bits back to step 0, and returns the bits before it.
     * begin: the result for the path that is stored, or ANY_PLACE. Before the step where both paths
     * meet they are the same. Called by the lane that leads. */
    KVANT_INLINE uint32_t trace(uint32_t bits, uint32_t begin)
    {
        uint8_t *path = space.path[row];
        uint32_t place = last_place(bits);
        path[0] = (uint8_t)bits;
#pragma unroll 1
        for (int group = whole + (rest != 0) - 1; group >= 0; group--) {
            if (begin != ANY_PLACE && path[group + 1] == place)
                return begin;
            path[group + 1] = (uint8_t)place;
            place = space.from[group][row][place];
        }
        return place;
    }

    /* Fills paths from cells. The first round tries PATH_TRIES ends of a path. The second round
     * finds the paths of the rows for which no end was the beginning. */
    KVANT_INLINE void find()
    {
        uint32_t begin = ANY_PLACE;
        bool wanted = true;
#pragma unroll 1
        for (int round = 0; round < 2; round++) {
            pass(round == 0 ? -WARM_UP_GROUPS : 0, begin);
            const uint32_t best = round == 0 ? best_bits() : begin;
            if (leads && wanted) {
                uint32_t end = best;
                begin = trace(end, ANY_PLACE);
                for (int tries = 1; round == 0 && begin != end && tries < PATH_TRIES; tries++) {
                    end = begin;
                    begin = trace(end, begin);
                }
                wanted = begin != end;
            }
            begin = __shfl_sync(FULL, wanted ? begin : ANY_PLACE, leader);
            wanted = begin != ANY_PLACE;
            if (!__any_sync(FULL, wanted))
                break;
        }
        __syncwarp();
    }
};

} // namespace kvant
