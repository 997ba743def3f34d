/* trellis_registers.cuh - the trellis search for 256 states, with all metrics in registers.
 *
 * A new state takes the place of a state before it. The numbers of both states differ in the bit
 * that leaves the window and in the bit that enters it, and the place's index has one bit for both.
 * Step t of 8 uses bit t of the place, so a place is the last 8 bits of a path, with the oldest bit
 * lowest. A lane has places 8 lane ... 8 lane + 7. Three of the 8 steps stay within its registers.
 * Five steps exchange metrics with the lane whose number differs in one bit.
 *
 * A register holds the metric and, in its low 8 bits, the place of the path before the 8 steps,
 * called its origin. So a minimum also selects the path, and among equal metrics the first one,
 * because origins differ in the step's bit and below. Origins are stored once for 8 steps, and a
 * trace goes back 8 steps by one look-up.
 *
 * Metrics are not limited to 65535 and not lowered here; never_limited says for which rows that
 * makes no difference. */
#pragma once

#include "trellis_search.cuh"

namespace kvant
{

constexpr int PLACE_STEPS = 8;

/* A warp's memory. */
template <int D> struct PlaceSpace {
    static constexpr int GROUPS = D / PLACE_STEPS;
    CostWords costs[D];                    /* costs of the steps */
    alignas(16) uint16_t most[D];          /* the largest cost of a step */
    alignas(16) uint8_t from[GROUPS][256]; /* the place before 8 steps */
    /* path[i + 1]: the last place of 8 steps, which is their bits; path[0]: of the last 8 steps */
    uint8_t path[GROUPS + 1];

    /* Reads the trellis bit and the subset of a step from its window, whose newest bit is the
     * highest. */
    KVANT_INLINE void read(int step, uint32_t &bit, uint32_t &subset) const
    {
        const int group = step / PLACE_STEPS;
        const uint32_t window = (path[group] | path[group + 1] << 8) >> step % PLACE_STEPS & 0x1ff;
        bit = window >> 8;
        subset = subset_of_window<8>(__brev(window) >> 23);
    }
};

/* The effect of bit `bit` of the place on the subset of the window at step t. The step's own bit is
 * both the newest and the oldest bit of the window. If a path keeps it, their effects cancel each
 * other. */
__host__ __device__ constexpr uint32_t place_effect(int t, int bit)
{
    return bit == t ? 0 : subset_of_window<8>(1u << ((t - bit) & 7));
}

__host__ __device__ constexpr uint32_t places_subset(int t, uint32_t place)
{
    uint32_t z = 0;
    for (int bit = 0; bit < 8; bit++)
        z ^= place >> bit & 1 ? place_effect(t, bit) : 0;
    return z;
}

template <int D> struct PlaceSearch {
    using S = PlaceSpace<D>;
    /* FAR: larger than all sums of costs */
    static constexpr uint32_t ANY_PLACE = 256, FAR = 0x80000000u;
    S &space;
    int lane;
    /* own: the part of the subset that the lane's bits cause at step t */
    uint32_t metric[8], own[PLACE_STEPS];

    __device__ PlaceSearch(S &space_, int lane_) : space(space_), lane(lane_)
    {
        unrolled_for (int t = 0; t < PLACE_STEPS; t++) {
            own[t] = 0;
            unrolled_for (int bit = 3; bit < 8; bit++)
                own[t] ^= lane >> (bit - 3) & 1 ? place_effect(t, bit) : 0;
        }
    }

    /* Whether the CPU's search never limits a metric of this row. Metrics are at most the costs of
     * the 8 steps before a lowering and of the 16 steps after it. This is so because every state is
     * 8 steps away from every other state. */
    KVANT_INLINE bool never_limited() const
    {
        static_assert(S::GROUPS <= 32, "a lane for each 8 steps");
        const uint4 eight = *reinterpret_cast<const uint4 *>(space.most + 8 * (lane % S::GROUPS));
        const uint32_t two = eight.x + eight.y + eight.z + eight.w, /* each at most 4 x 8191 */
            sum = (two & 0xffffu) + (two >> 16);
        const uint32_t all = sum + __shfl_sync(FULL, sum, (lane + 1) % S::GROUPS) +
                             __shfl_sync(FULL, sum, (lane + 2) % S::GROUPS);
        return __all_sync(FULL, all < 65535);
    }

    /* Starts all paths, or only the path of one place. */
    KVANT_INLINE void start(uint32_t place)
    {
        unrolled_for (int q = 0; q < 8; q++)
            metric[q] = place == ANY_PLACE || place == 8 * lane + q ? 0 : FAR;
    }

    /* The costs of subset z, combined with the subset of the lane's bits. */
    KVANT_INLINE uint32_t cost_of(const uint32_t *row, int t, uint32_t z) const
    {
        /* shifted above the origins */
        return prmt(row[(z & 3) ^ own[t]], 0, z & 4 ? 0x4324 : 0x4104);
    }

    KVANT_INLINE void advance(const uint32_t *row, int t)
    {
        uint32_t cost[8], other[8];
        unrolled_for (int z = 0; z < 8; z++)
            cost[z] = cost_of(row, t, z);
        unrolled_for (int q = 0; q < 8; q++)
            other[q] =
                t < 3 ? metric[q ^ (1 << t)] : __shfl_xor_sync(FULL, metric[q], 1 << (t - 3));
        unrolled_for (int q = 0; q < 8; q++) {
            const uint32_t z = places_subset(t, q);
            metric[q] = __viaddmin_u32(other[q], cost[z ^ 2], metric[q] + cost[z]);
        }
    }

    /* Advances eight steps, from step `first` of the circle. */
    KVANT_INLINE void advance_group(int first)
    {
        unrolled_for (int q = 0; q < 8; q++)
            metric[q] = (metric[q] & ~255u) | (8 * lane + q);
        unrolled_for (int t = 0; t < PLACE_STEPS; t++)
            advance(reinterpret_cast<const uint32_t *>(space.costs + first + t), t);
    }

    KVANT_INLINE void keep_origins(uint8_t *from)
    {
        uint32_t word[2];
        unrolled_for (int i = 0; i < 2; i++)
            word[i] = prmt(prmt(metric[4 * i], metric[4 * i + 1], 0x40),
                           prmt(metric[4 * i + 2], metric[4 * i + 3], 0x40), 0x5410);
        *reinterpret_cast<uint2 *>(from + 8 * lane) = make_uint2(word[0], word[1]);
    }

    KVANT_INLINE void pass(uint32_t begin)
    {
        start(begin);
        __syncwarp(); /* the preceding trace has read its origins */
#pragma unroll 1
        for (int group = begin == ANY_PLACE ? -WARM_UP / PLACE_STEPS : 0; group < S::GROUPS;
             group++) {
            advance_group(PLACE_STEPS * (group < 0 ? group + S::GROUPS : group));
            if (group >= 0)
                keep_origins(space.from[group]);
        }
        __syncwarp();
    }

    /* The place with the least metric. Among equal metrics it is the place of the lowest state,
     * which is the place with its bits reversed. */
    KVANT_INLINE uint32_t best_place() const
    {
        uint32_t best = 0xffffffffu;
        unrolled_for (int q = 0; q < 8; q++)
            best = min(best, (metric[q] & ~255u) | __brev(8 * lane + q) >> 24);
        return __brev(__reduce_min_sync(FULL, best)) >> 24;
    }

    /* Follows the path that ends in a place back to step 0; returns the place before it. */
    KVANT_INLINE uint32_t trace(uint32_t place)
    {
        if (lane == 0)
            space.path[0] = (uint8_t)place;
#pragma unroll 4
        for (int group = S::GROUPS - 1; group >= 0; group--) {
            if (lane == 0)
                space.path[group + 1] = (uint8_t)place;
            place = space.from[group][place];
        }
        return place;
    }

    /* The same with metrics limited to 16 bits. Seldom used. */
    __device__ __noinline__ static void find_limited(S &space, int lane)
    {
        using Limited = SearchSpace<D, 8>;
        constexpr int OTHERS = offsetof(Limited, decisions),
                      ROOM = (int)(sizeof(S::from) - OTHERS) / 32;
        static_assert(ROOM > 0, "memory for a step");
        Limited &limited = *reinterpret_cast<Limited *>(space.from);
        for (int step = lane; step < D; step += 32)
            limited.cells[step] = (uint16_t)step;
        __syncwarp();
        Search<D, 8>(limited, space.costs, lane, D, ROOM < D ? ROOM : D).find();
        for (int i = lane; i <= S::GROUPS; i += 32) {
            const uint8_t *bits = limited.bits + PLACE_STEPS * ((i + S::GROUPS - 1) % S::GROUPS);
            uint32_t place = 0;
            for (int t = 0; t < PLACE_STEPS; t++)
                place |= (uint32_t)bits[t] << t;
            space.path[i] = (uint8_t)place;
        }
        __syncwarp();
    }

    /* Fills path from costs. */
    KVANT_INLINE void find()
    {
        if (!never_limited())
            return find_limited(space, lane);
        uint32_t begin = ANY_PLACE, end = 0;
#pragma unroll 1
        for (int tries = 0; tries <= PATH_TRIES; tries++) {
            if (tries == 0 || tries == PATH_TRIES) {
                pass(begin);
                end = tries == 0 ? best_place() : begin;
            }
            begin = trace(end);
            if (begin == end)
                break;
            end = begin;
        }
        __syncwarp();
    }
};

} // namespace kvant
