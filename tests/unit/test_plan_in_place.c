/* test_plan_in_place.c - how many layers of a cache in place go to pages before a step. */
#include "../cases.h"
#include "../../src/store/plan.h"

/* Steps of any lengths fill a cache in place. No step finds more layers in place than cells are
 * left after it, and single tokens take one layer each. */
CASE(layers_leave_their_place_one_by_one)
{
    enum { ROOM = 512, LAYERS = 30 };
    for (size_t first = 1; first < 40; first++) {
        size_t n_layers = LAYERS, n = ROOM - LAYERS - 40, left;
        for (size_t i = 0; n < ROOM; i++) {
            const size_t some = i == 0  ? first
                                : i % 5 ? 1
                                        : 2,
                         n_tokens = n + some < ROOM ? some : 1;
            left = ROOM - n - n_tokens;
            const size_t gone = kvant_plan_layers_to_go(n_layers, left, n_tokens);
            assert_true(gone <= n_tokens + 1 && gone <= n_layers);
            n_layers -= gone;
            assert_true(n_layers <= left);
            n += n_tokens;
        }
        assert_true(n_layers == 0);
    }
    assert_true(kvant_plan_layers_to_go(LAYERS, 200, 1) == 0);
    assert_true(kvant_plan_layers_to_go(LAYERS, LAYERS - 1, 1) == 1);
    assert_true(kvant_plan_layers_to_go(LAYERS, 0, 100) == LAYERS);
}

RUN_CASES(NULL, NULL)
