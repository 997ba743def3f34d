/* learn_reference.c - learning on the CPU by the GPU's own code (src/cuda/learn), with teams of one
 * thread. Sums of products have the order that they have on a GPU. Results have the GPU's bits. */
#include "learn_reference.h"

#include <stdlib.h>

#include "../../src/base/half.h"
#include "learn/call.h"

/* Adds the products of a slice of vectors, and the vectors. */
static void add_products(const learn_slice *s, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t j = 0; j <= i; j++) {
            float sum = 0;
            for (int k = 0; k < s->n_vectors; k++)
                sum = fmaf(s->vectors[(uint32_t)k * n + i], s->vectors[(uint32_t)k * n + j], sum);
            s->products[i * n + j] = sum;
        }
        float all = 0;
        for (int k = 0; k < s->n_vectors && s->total; k++)
            all += s->vectors[(uint32_t)k * n + i];
        if (s->total)
            s->total[i] = all;
    }
}

static void add_slices(const learn_call *c, uint32_t sub, learn_sample *sample)
{
    const learn_input in = learn_input_of(c, sub);
    const uint32_t slices = kvant_learn_key_slices(&c->args) + kvant_learn_query_slices(&c->args);
    learn_make_rule(&in, sample, learn_rule_of(c, sub));
    for (size_t i = 0; i < kvant_learn_vectors(&c->args); i++)
        learn_make_vector(&in, (int)i, learn_rule_of(c, sub));
    for (uint32_t slice = 0; slice < slices; slice++) {
        const learn_slice of = learn_slice_of(c, sub, slice);
        add_products(&of, c->args.part);
    }
}

static void make_transform(const learn_call *c, uint32_t sub, uint32_t transform,
                           learn_shared *shared)
{
    double part[LEARN_MOST];
    float center[LEARN_MOST], start[LEARN_MOST];
    learn_call_tables(c, sub, transform, part, center, start);
    for (int x = 0; x < (int)c->args.part / 2; x++)
        for (int y = 0; y <= x; y++)
            learn_call_pair(c, sub, transform, x, y);
    learn_call_solve(c, sub, transform, shared);
}

void learn_reference(const kvant_cuda_learn_args *args)
{
    const learn_call c = learn_call_of(args);
    const uint32_t parts = learn_parts(&c), n_subs = kvant_learn_all_subs(args),
                   pairs = args->head_dim / 2;
    learn_sample *sample = malloc(sizeof *sample);
    learn_shared *shared = malloc(sizeof *shared);
    for (uint32_t i = 0; i < (args->n_rows + args->n_tokens) * pairs; i++)
        learn_phase(args, (int)(i / pairs), (int)(i % pairs),
                    (float *)(void *)learn_room_at(&c, c.room.phases) + 2 * (size_t)i);
    for (uint32_t sub = 0; sub < n_subs; sub++)
        add_slices(&c, sub, sample);
    for (uint32_t transform = 0; transform < args->n_transforms; transform++) {
        for (uint32_t sub = 0; sub < n_subs; sub++)
            make_transform(&c, sub, transform, shared);
        for (uint32_t head = 0; head < n_subs / parts && parts > 1; head++)
            learn_call_balance(&c, head, transform);
    }
    free(sample);
    free(shared);
}
