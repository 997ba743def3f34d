/* twins_random.h - random calls to twins: appends, forks, truncations, dropped blocks, imports and
 * attention. test_cuda_cache.c chooses the codecs. */
#ifndef KVANT_TESTS_TWINS_RANDOM_H
#define KVANT_TESTS_TWINS_RANDOM_H

#include "twins.h"

enum { MOST_QUERIES = 20, STEPS = 60 };

static inline void attend_somehow(twins *t, int32_t s)
{
    const uint32_t seen = twins_length(t, s) - 64 * t->dropped[s],
                   limit = seen < MOST_QUERIES ? seen : MOST_QUERIES;
    if (twins_length(t, s) <= 64 * t->dropped[s])
        return;
    const attention_problem p = { .query_tokens =
                                      random_bits() % 2 ? 1 : 1 + (uint32_t)(random_bits() % limit),
                                  .causal = random_bits() % 4 != 0,
                                  .window =
                                      random_bits() % 3 ? 0 : 1 + (uint32_t)(random_bits() % 200),
                                  .softcap = random_bits() % 4 ? 0 : random_uniform(1, 60),
                                  .max_bias = random_bits() % 4 ? 0 : random_uniform(1, 8),
                                  .mask = random_bits() % 4 == 0,
                                  .sinks = random_bits() % 4 == 0 };
    twins_attend(t, s, (uint32_t)(random_bits() % LAYERS), &p);
}

static inline void fork_one(twins *t, int32_t s)
{
    int32_t of_cpu = kvant_sequence_fork(t->cpu, s), of_gpu = kvant_sequence_fork(t->gpu, s);
    assert_int_equal(of_gpu, of_cpu);
    if (of_gpu >= 0)
        t->dropped[of_gpu] = t->dropped[s];
}

static inline void truncate_one(twins *t, int32_t s)
{
    const uint32_t least = 64 * t->dropped[s], length = twins_length(t, s);
    const uint32_t to = least + (uint32_t)(random_bits() % (length - least + 1));
    assert_int_equal(kvant_sequence_truncate(t->cpu, s, to), KVANT_OK);
    assert_int_equal(kvant_sequence_truncate(t->gpu, s, to), KVANT_OK);
}

static inline void drop_one(twins *t, int32_t s)
{
    const uint32_t blocks = twins_length(t, s) / 64;
    if (blocks <= t->dropped[s] + 1)
        return;
    t->dropped[s]++;
    assert_int_equal(kvant_sequence_drop(t->cpu, s, 64 * t->dropped[s]), KVANT_OK);
    assert_int_equal(kvant_sequence_drop(t->gpu, s, 64 * t->dropped[s]), KVANT_OK);
}

static inline void free_one(twins *t, int32_t s)
{
    kvant_sequence_free(t->cpu, s);
    kvant_sequence_free(t->gpu, s);
    t->dropped[s] = 0;
    assert_int_equal(kvant_sequence_create(t->cpu), s);
    assert_int_equal(kvant_sequence_create(t->gpu), s);
}

static inline void random_calls(const spec_pair *spec, bool attend)
{
    twins t;
    int forks = 0, full = 0;
    twins_new(&t, spec, SEQUENCES);
    if (strstr(spec->k, "transform=first"))
        twins_learn(&t);
    int32_t alive = kvant_sequence_create(t.cpu) + 1;
    assert_int_equal(kvant_sequence_create(t.gpu) + 1, alive);
    for (int step = 0; step < STEPS; step++) {
        int32_t s = (int32_t)(random_bits() % (uint64_t)alive);
        const uint64_t call = random_bits() % 12;
        switch (step == STEPS / 3 ? 10 : step ? call : 0) { /* at least one fork */
        case 7:
            full += !twins_append_all(&t, (uint32_t)alive, 1 + (uint32_t)(random_bits() % 40));
            break;
        case 8: truncate_one(&t, s); break;
        case 9: drop_one(&t, s); break;
        case 10:
            if (alive < SEQUENCES) {
                fork_one(&t, s);
                alive++, forks++;
            }
            break;
        case 11:
            if (alive == SEQUENCES)
                free_one(&t, s);
            break;
        default:
            full +=
                !twins_append(&t, s, 1 + (uint32_t)(random_bits() % (random_bits() % 2 ? 3 : 130)));
        }
        twins_compare(&t);
        if (attend)
            attend_somehow(&t, s);
    }
    printf("%s / %s: %d forks, %d times full, %u blocks waited, at most %u versions at once, error "
           "/ bound %.3f\n",
           spec->k, spec->v, forks, full, t.waited, t.most_parts, t.worst);
    const bool waits =
        strstr(spec->k, "trellis") || strstr(spec->k, "octopus") ||
        (strstr(spec->k, "hqmq") && !strstr(spec->k, "median=page")); /* sealed as whole blocks */
    assert_true(!attend || (forks > 0 && (!waits || strstr(spec->k, "recent") || t.waited > 0)));
    twins_free(&t);
}

#endif
