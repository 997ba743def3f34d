/* test_search.cpp - the trellis search with all metrics in registers
 * (src/cuda/encode/trellis_registers.cuh) without a GPU. The warp of warp.h runs it, and the CPU's
 * portable search is the reference. */
#include "warp.h"

#include "device/encode/trellis_registers.cuh"
#include "search_cases.h"

Warp warp;

using namespace kvant;

static constexpr int SPACE_AT = 1 << 16;

static struct Task {
    const search_case *of;
    bool limited; /* whether the row needs metrics of 16 bits */
} task;

template <int D> static void search()
{
    constexpr int N = D / 32;
    auto &levels = *reinterpret_cast<TrellisLevels *>(warp.shared);
    auto &space = *reinterpret_cast<PlaceSpace<D> *>(warp.shared + SPACE_AT);
    const search_case &c = *task.of;
    kvant_cuda_trellis trellis{};
    trellis.memory = 8, trellis.bits = c.bits, trellis.n_levels = c.n_levels,
    trellis.per_deviation = c.per_deviation;
    for (uint32_t i = warp.lane; i < c.n_levels; i += 32)
        levels.scaled[i] = (float)(CELLS_PER_DEVIATION * c.levels[i]);
    meet();
    int cells[N];
    for (int j = 0; j < N; j++)
        cells[j] = c.cells[warp.lane + 32 * j];
    costs_of_cells(levels, trellis, cells, [&](int j, const CostWords &words, uint32_t most) {
        space.costs[warp.lane + 32 * j] = words;
        space.most[warp.lane + 32 * j] = (uint16_t)most;
    });
    meet();
    PlaceSearch<D> places(space, warp.lane);
    task.limited = !places.never_limited();
    places.find();
    meet();
}

template <int D> static int check(const search_case &c, int &limited)
{
    task = Task{ &c, false };
    memset(warp.shared, 0x3c, sizeof warp.shared);
    run_lanes(search<D>);
    limited += task.limited;
    const auto &space = *reinterpret_cast<const PlaceSpace<D> *>(warp.shared + SPACE_AT);
    const auto &levels = *reinterpret_cast<const TrellisLevels *>(warp.shared);
    kvant_cuda_trellis trellis{};
    trellis.n_levels = c.n_levels, trellis.per_deviation = c.per_deviation;
    for (int step = 0; step < D; step++) {
        uint32_t bit, subset;
        space.read(step, bit, subset);
        if (bit == c.bit[step] && subset == c.subset[step] &&
            nearest_of(trellis, levels, c.cells[step], subset) == c.nearest[step])
            continue;
        printf("FAILED %d bits, %d steps, kind %d: bit %u of subset %u at step %d\n", (int)c.bits,
               D, c.kind, bit, subset, step);
        return 1;
    }
    return 0;
}

int main()
{
    int failed = 0, limited = 0, n = 0;
    for (uint32_t bits = 2; bits <= 4; bits++)
        for (uint32_t steps : { 64u, 96u, 128u, 256u })
            for (int i = 0; i < 24; i++, n++) {
                search_case c;
                search_case_make(bits, steps, i, &c);
                failed += steps == 64    ? check<64>(c, limited)
                          : steps == 96  ? check<96>(c, limited)
                          : steps == 128 ? check<128>(c, limited)
                                         : check<256>(c, limited);
            }
    printf("%d failed of %d, %d with metrics of 16 bits\n", failed, n, limited);
    return failed != 0 || limited == 0 || limited == n;
}
