/* test_attention_cut.c - how a step of one token is cut into work items. The times are those of
 * plan.c: a page takes 1, and an item 1 more. */
#include "testing.h"

#include "../../src/attention/plan.h"

enum { PAGE = 1, ITEM = 1, MOST_THREADS = 16 };

static kvant_attention_plan cut(uint32_t n_kv_heads, uint32_t n_pages)
{
    static const char source[] = "not a tensor";
    kvant_attention_plan plan = { .source = source,
                                  .problem = { .n_tokens = 64 * n_pages,
                                               .n_queries = 1,
                                               .n_heads = 3 * n_kv_heads,
                                               .n_threads = 1 },
                                  .k_views.n = 1,
                                  .v_transforms.n = 1,
                                  .n_kv_heads = n_kv_heads,
                                  .k_dim = 64,
                                  .v_dim = 64,
                                  .n_pages = n_pages };
    assert_true(kvant_attention_cut(&plan));
    return plan;
}

/* When the items of splits of `pages` pages end, if each thread takes the next item once it is
 * free. */
static uint32_t end_of(const kvant_attention_plan *plan, uint32_t pages, uint32_t n_threads)
{
    uint32_t busy[MOST_THREADS] = { 0 }, last = 0;
    const uint32_t n_splits = (plan->n_pages + pages - 1) / pages;
    for (uint32_t item = 0; item < n_splits * plan->n_kv_heads; item++) {
        const uint32_t left = plan->n_pages - item / plan->n_kv_heads * pages;
        uint32_t next = 0;
        for (uint32_t t = 1; t < n_threads; t++)
            next = busy[t] < busy[next] ? t : next;
        busy[next] += PAGE * (left < pages ? left : pages) + ITEM;
        last = busy[next] > last ? busy[next] : last;
    }
    return last;
}

static uint32_t weighted_end(const kvant_attention_plan *plan, uint32_t pages)
{
    return 4 * end_of(plan, pages, 8) + end_of(plan, pages, 12) + end_of(plan, pages, 16);
}

/* plan.c finds the ends by a formula, and this test by taking items one by one. */
CASE(no_other_split_ends_sooner)
{
    for (uint32_t n_kv_heads = 1; n_kv_heads <= 8; n_kv_heads++)
        for (uint32_t n_pages = 1; n_pages <= 200; n_pages++) {
            const kvant_attention_plan plan = cut(n_kv_heads, n_pages);
            const uint32_t end = weighted_end(&plan, plan.split_pages);
            assert_in_range(plan.split_pages, 2, 16);
            if (n_pages <= 4) {
                assert_int_equal(plan.n_splits, 1);
                continue;
            }
            assert_int_equal(plan.n_splits, (n_pages + plan.split_pages - 1) / plan.split_pages);
            for (uint32_t pages = 2; pages <= 16; pages++)
                assert_true(end <= weighted_end(&plan, pages));
        }
}

RUN_CASES(NULL, NULL)
