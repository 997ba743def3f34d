/* test_direct.cpp - tiers in src/cuda/papers/direct.cuh without a GPU. The warp of warp.h computes
 * scores and sums of a page, which are compared with the CPU's rows in double precision.
 *
 * For the bounds, u = 2^-11. A level, its scaled weight and a query's number are rounded to fp16,
 * by u / 2 each. Rotated queries and rotated sums are rounded again, by u / 2 of their length, and
 * so are the rotations. In all, that is at most 12 u of lengths. */
#include "warp.h"

#include "device/papers/direct_tiers.cuh"
#include "page.h"

Warp warp;

using namespace kvant;

static constexpr int ROWS = 8, MOST = 128, PAGE_AT = 0, BOOKS_AT = 1 << 15, OWN_AT = 1 << 16,
                     QUERIES_AT = OWN_AT + (1 << 14);

static struct Task {
    const test_page *page;
    double queries[ROWS][MOST], weights[64][ROWS]; /* fp16 queries */
    double scores[64][ROWS], sums[ROWS][MOST];     /* computed by the warp */
} task;

template <class F> static void score(F &tiers, const __half *queries)
{
    float s[F::TILES][4] = {};
    tiers.keys(warp.shared + PAGE_AT, queries, F::D + 8, s);
    for (int k = 0; k < F::TILES; k++)
        for (int i = 0; i < 4; i++)
            task.scores[16 * k + 8 * (i / 2) + warp.lane / 4][2 * (warp.lane % 4) + i % 2] =
                s[k][i];
}

template <class F> static void sum_up(F &tiers)
{
    const uint8_t *page = warp.shared + PAGE_AT;
    uint32_t w[2][F::TILES][2];
    for (int k = 0; k < F::TILES; k++)
        for (int r = 0; r < 2; r++) {
            const int token = 16 * k + 8 * r + warp.lane / 4;
            const double *weights = task.weights[token] + 2 * (warp.lane % 4);
            for (int i = 0; i < 2; i++) {
                const float scale = tiers.value_scale(page, i, token);
                w[i][k][r] =
                    transpose8x8(pack_half2((float)weights[0] * scale, (float)weights[1] * scale));
            }
        }
    tiers.values(page, w);
}

template <class F> static void run_lane()
{
    const kvant_general &g = task.page->general;
    __half *queries = reinterpret_cast<__half *>(warp.shared + QUERIES_AT);
    F::load_books(g, g, warp.shared + BOOKS_AT, warp.lane, LANES);
    if (warp.lane == 0) {
        memcpy(warp.shared + PAGE_AT, task.page->page, task.page->bytes);
        for (int n = 0; n < ROWS; n++)
            for (int j = 0; j < F::D; j++)
                queries[n * (F::D + 8) + j] = __float2half_rn((float)task.queries[n][j]);
    }
    __syncwarp();
    F tiers(g, g, warp.shared + BOOKS_AT, warp.shared + OWN_AT, warp.lane);
    g.keys ? score(tiers, queries) : sum_up(tiers);
    __syncwarp();
    for (int i = warp.lane; !g.keys && i < ROWS * F::D; i += LANES)
        task.sums[i % ROWS][i / ROWS] = reinterpret_cast<float *>(warp.shared + OWN_AT)[i];
    warp.lane++; /* the next lane finishes next */
}

static void run_warp(void (*lane)())
{
    static uint8_t stacks[LANES][1 << 16];
    memset(warp.shared, 0x3c, sizeof warp.shared);
    for (int i = LANES - 1; i >= 0; i--) {
        getcontext(&warp.lanes[i]);
        warp.lanes[i].uc_stack.ss_sp = stacks[i];
        warp.lanes[i].uc_stack.ss_size = sizeof stacks[i];
        warp.lanes[i].uc_link = i + 1 < LANES ? &warp.lanes[i + 1] : &warp.caller;
        makecontext(&warp.lanes[i], lane, 0);
    }
    warp.lane = 0;
    swapcontext(&warp.caller, &warp.lanes[0]);
}

static double random_number()
{
    return __half2float(__float2half_rn((float)rand() / (float)RAND_MAX - 0.5f));
}

/* Root mean square error, relative to lengths. */
static double error_of(int d)
{
    const float *rows = task.page->rows;
    double worst = 0;
    if (task.page->general.keys) {
        for (int t = 0; t < 64; t++)
            for (int n = 0; n < ROWS; n++) {
                double sum = 0, q = 0, y = 0;
                for (int j = 0; j < d; j++)
                    sum += task.queries[n][j] * rows[t * d + j],
                        q += task.queries[n][j] * task.queries[n][j],
                        y += (double)rows[t * d + j] * rows[t * d + j];
                worst = fmax(worst, fabs(sum - task.scores[t][n]) / sqrt(q * y));
            }
        return worst;
    }
    for (int n = 0; n < ROWS; n++) {
        double error = 0, size = 0;
        for (int t = 0; t < 64; t++) {
            double length = 0;
            for (int j = 0; j < d; j++)
                length += (double)rows[t * d + j] * rows[t * d + j];
            size += task.weights[t][n] * sqrt(length);
        }
        for (int j = 0; j < d; j++) {
            double sum = 0;
            for (int t = 0; t < 64; t++)
                sum += task.weights[t][n] * rows[t * d + j];
            error += (sum - task.sums[n][j]) * (sum - task.sums[n][j]);
        }
        worst = fmax(worst, sqrt(error) / size);
    }
    return worst;
}

template <class F> static int check(const char *spec)
{
    int failed = 0;
    for (const kvant_role role : { KVANT_ROLE_K, KVANT_ROLE_V }) {
        test_page page;
        if (!test_page_make(spec, F::D, role, &page))
            return 0;
        task.page = &page;
        for (auto &row : task.queries)
            for (double &x : row)
                x = random_number();
        for (auto &row : task.weights)
            for (double &x : row)
                x = fabs(random_number());
        run_warp(run_lane<F>);
        const double error = error_of(F::D);
        if (!(error <= 12 * 0x1p-11)) {
            printf("FAILED %s, head_dim %d, %s: error %g\n", spec, F::D,
                   role == KVANT_ROLE_K ? "keys" : "values", error);
            failed++;
        }
        test_page_free(&page);
    }
    return failed;
}

template <int D> static int check_all()
{
    return check<TieredCodes<D, 2>>("turboquant-2.5") + check<TieredCodes<D, 3>>("turboquant-3.5");
}

int main()
{
    const int failed = check_all<64>() + check_all<128>();
    printf("%d failed\n", failed);
    return failed != 0;
}
