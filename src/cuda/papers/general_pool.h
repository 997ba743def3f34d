/* general_pool.h - outliers of a page in the general form: chunks of 4 channels that lie far above
 * the median of all chunks of a page (format.md, "Outliers of a page").
 *
 * Chooses them and gives them slots. In CUDA the team is a thread block, and every thread has to
 * call the functions that take a page. Codes and scales are in general_codes.h. */
#pragma once

#include "general_numbers.h"

#define GENERAL_NO_SLOT 0xffffffffu

/* The fp16 rows of a page. Tokens from `there` on count as copies of the first. */
typedef struct general_page {
    const uint16_t *rows;
    int there, head_dim;
} general_page;

/* Chunks whose squared norm has larger bits than `above` are outliers. So are the next `ties`
 * chunks with the same bits. slot: the slot of the next outlier. */
typedef struct general_pool {
    uint32_t above, ties, slot;
} general_pool;

/* The sum of a number over the team's threads. */
KVANT_INLINE uint32_t general_sum_of_threads(uint32_t own)
{
#if defined(__CUDACC__)
    __shared__ uint32_t total;
    __syncthreads(); /* the preceding total has been read */
    if (threadIdx.x == 0)
        total = 0;
    __syncthreads();
    atomicAdd(&total, own);
    __syncthreads();
    return total;
#else
    return own;
#endif
}

/* The bits of a chunk's squared norm, which are in the order of the norms. */
KVANT_INLINE uint32_t general_square_bits(const general_page *page, int token, int chunk)
{
    const uint16_t *from =
        page->rows + (size_t)(token < page->there ? token : 0) * (size_t)page->head_dim + 4 * chunk;
    float x[4];
    unrolled_for (int i = 0; i < 4; i++)
        x[i] = general_from_half(from[i]);
    return general_to_bits(general_dot4(x, x));
}

KVANT_INLINE uint32_t general_count_above(general_team team, const kvant_general *g,
                                          const general_page *page, uint32_t bits)
{
    const int n = (int)g->view.chunks.n;
    uint32_t own = 0;
    for (int i = team.lane; i < GENERAL_TOKENS * n; i += team.lanes)
        own += general_square_bits(page, i / n, i % n) > bits;
    return general_sum_of_threads(own);
}

/* The least bits that at most n chunks exceed. */
KVANT_INLINE uint32_t general_exceeded_by(general_team team, const kvant_general *g,
                                          const general_page *page, uint32_t n)
{
    uint32_t low = 0, high = 0x7f800000u; /* infinity */
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (general_count_above(team, g, page, middle) <= n)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Chooses a page's outliers; the slot is the first. */
KVANT_INLINE general_pool general_choose_pool(general_team team, const kvant_general *g,
                                              const general_page *page)
{
    const uint32_t room = g->view.chunks.pool;
    general_pool pool = { 0, 0, 0 };
    const float median = general_from_bits(
        general_exceeded_by(team, g, page, GENERAL_TOKENS / 2 * g->view.chunks.n));
    pool.above = general_to_bits(
        general_mul(general_mul(g->view.chunks.multiple, g->view.chunks.multiple), median));
    if (general_count_above(team, g, page, pool.above) > room) {
        pool.above = general_exceeded_by(team, g, page, room);
        pool.ties = room - general_count_above(team, g, page, pool.above);
    }
    return pool;
}

/* The outliers of a token: chunks above the limit, and chunks with the limit's bits. */
typedef struct general_outlier_count {
    uint32_t larger, equal;
} general_outlier_count;

KVANT_INLINE general_outlier_count general_count_outliers(const kvant_general *g,
                                                          const general_page *page,
                                                          const general_pool *pool, int token)
{
    general_outlier_count count = { 0, 0 };
    for (int c = 0; c < (int)g->view.chunks.n; c++) {
        const uint32_t bits = general_square_bits(page, token, c);
        count.larger += bits > pool->above;
        count.equal += bits == pool->above;
    }
    return count;
}

/* The state at the first chunk of a token; with token 64, at the end of the page. counts: of all
 * tokens. */
KVANT_INLINE general_pool general_pool_at(general_pool pool, const general_outlier_count *counts,
                                          int token)
{
    for (int t = 0; t < token; t++) {
        const uint32_t ties = counts[t].equal < pool.ties ? counts[t].equal : pool.ties;
        pool.slot += counts[t].larger + ties;
        pool.ties -= ties;
    }
    return pool;
}

/* Writes the slots of the row s->y to s->codes, and GENERAL_NO_SLOT for ordinary chunks. pool: the
 * state at the row's first chunk. s->a is scratch. */
KVANT_INLINE void general_take_slots(general_team team, const kvant_general *g,
                                     const general_space *s, const general_pool *pool)
{
    const int n = (int)g->view.chunks.n;
    for (int c = team.lane; c < n; c += team.lanes)
        s->a[c] = general_dot4(s->y + 4 * c, s->y + 4 * c);
    general_meet();
    for (int c = team.lane; c < n; c += team.lanes) {
        const uint32_t own = general_to_bits(s->a[c]);
        uint32_t larger = 0, equal = 0;
        for (int k = 0; k < c; k++) {
            const uint32_t bits = general_to_bits(s->a[k]);
            larger += bits > pool->above;
            equal += bits == pool->above;
        }
        const bool outlier = own > pool->above || (own == pool->above && equal < pool->ties);
        s->codes[c] = outlier ? pool->slot + larger + (equal < pool->ties ? equal : pool->ties)
                              : GENERAL_NO_SLOT;
    }
    general_meet();
}
