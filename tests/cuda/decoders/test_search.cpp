/* test_search.cpp - the trellis search of append kernels (src/cuda/encode/trellis_search.cuh)
 * without a GPU. The warp of warp.h runs it for rows of different kinds at once, and the CPU's
 * portable search is the reference. */
#include "warp.h"

#include "device/encode/trellis_search.cuh"
#include "search_cases.h"

Warp warp;

using namespace kvant;

static constexpr int ROWS = 4, SPACE_AT = 1 << 16;

static struct Task {
    const search_case *rows;
    int n_rows, n_steps;
} task;

template <int MOST> static PathSpace<MOST, ROWS> &space_of()
{
    return *reinterpret_cast<PathSpace<MOST, ROWS> *>(warp.shared + SPACE_AT);
}

static CellTable &table()
{
    return *reinterpret_cast<CellTable *>(warp.shared);
}

/* MOST: the steps for which there is memory. Kernels of any/ search fewer steps. */
template <int MOST> static void search()
{
    using S = PathSpace<MOST, ROWS>;
    S &space = space_of<MOST>();
    const search_case &c = task.rows[0];
    kvant_cuda_trellis trellis{};
    trellis.bits = c.bits, trellis.n_levels = c.n_levels, trellis.per_deviation = c.per_deviation;
    memcpy(trellis.levels, c.levels, sizeof trellis.levels);
    table().fill(trellis);
    for (int row = 0; row < task.n_rows; row++)
        for (int step = warp.lane; step < task.n_steps; step += 32)
            for (int at = step; at >= -WARM_UP; at -= task.n_steps)
                space.put_cell(row, S::position_of(at), task.rows[row].cells[step]);
    meet();
    PathSearch<S>(space, table(), warp.lane, 0, task.n_rows, task.n_steps).find();
}

template <int MOST> static int check(const search_case *rows, int n_rows, int n_steps)
{
    int failed = 0;
    task = Task{ rows, n_rows, n_steps };
    memset(warp.shared, 0x3c, sizeof warp.shared);
    run_lanes(search<MOST>);
    const auto &space = space_of<MOST>();
    for (int row = 0; row < n_rows; row++)
        for (int step = 0; step < n_steps; step++) {
            const search_case &c = rows[row];
            uint32_t bit, subset;
            space.read(row, space.position_of(step), bit, subset);
            const int cell = space.cell_at(row, space.position_of(step));
            if (bit == c.bit[step] && subset == c.subset[step] && cell == c.cells[step] &&
                table().nearest_of(cell, subset) == c.nearest[step])
                continue;
            printf("FAILED %d bits, %d steps, row %d of %d, kind %d: bit %u of subset %u at step "
                   "%d\n",
                   (int)c.bits, n_steps, row, n_rows, c.kind, bit, subset, step);
            failed++;
            break;
        }
    return failed;
}

int main()
{
    int failed = 0, n = 0;
    for (uint32_t bits = 2; bits <= 4; bits++)
        for (int steps : { 16, 32, 48, 64, 80, 96, 128, 192, 256, 512 })
            for (int i = 0; i < 24;) {
                search_case rows[ROWS];
                const int n_rows = 1 + (i + steps / 16) % ROWS;
                for (int row = 0; row < n_rows; row++)
                    search_case_make(bits, (uint32_t)steps, i++, &rows[row]);
                failed += steps == 64    ? check<64>(rows, n_rows, steps)
                          : steps == 96  ? check<96>(rows, n_rows, steps)
                          : steps == 128 ? check<128>(rows, n_rows, steps)
                          : steps == 256 ? check<256>(rows, n_rows, steps)
                                         : check<512>(rows, n_rows, steps);
                n += n_rows;
            }
    printf("%d failed of %d\n", failed, n);
    return failed != 0;
}
