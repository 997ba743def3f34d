/* learn_reference.c - learning on the CPU by the GPU's own code (src/cuda/learn), with teams of one
 * thread. Sums of products have the order that they have on a GPU. Results have the GPU's bits. */
#include "learn_reference.h"

#include <stdlib.h>

#include "../../src/base/half.h"
#include "../../src/device/learn_room.h"
#include "learn/sums.h"

typedef struct call {
    const kvant_cuda_learn_args *args;
    kvant_learn_room room;
    uint32_t parts;
} call;

static void *room_at(const call *c, size_t offset)
{
    return (char *)c->args->workspace + offset;
}

static learn_input input_of(const call *c, uint32_t sub)
{
    const size_t vectors = kvant_learn_vectors(c->args);
    return (learn_input){ .args = c->args,
                          .kv_head = sub / c->parts,
                          .part = sub % c->parts,
                          .phases = room_at(c, c->room.phases),
                          .counts = (uint8_t *)room_at(c, c->room.flags) + sub * vectors,
                          .vectors =
                              (float *)room_at(c, c->room.work) + sub * vectors * c->args->part };
}

static learn_rule rule_of(const call *c, uint32_t sub)
{
    const uint32_t n = c->args->part;
    float *at = (float *)room_at(c, c->room.rules) + sub * kvant_learn_rule(n);
    return (learn_rule){ at, at + n, at + 2 * n };
}

static float *sums_of(const call *c, uint32_t sub)
{
    return (float *)room_at(c, c->room.sums) + sub * kvant_learn_sums(c->args);
}

/* Adds the products of a slice of vectors, and the vectors (total NULL: not). */
static void add_products(const float *vectors, size_t n_vectors, uint32_t n, float *sums,
                         float *total)
{
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t j = 0; j <= i; j++) {
            float sum = 0;
            for (size_t k = 0; k < n_vectors; k++)
                sum = fmaf(vectors[k * n + i], vectors[k * n + j], sum);
            sums[i * n + j] = sum;
        }
        float all = 0;
        for (size_t k = 0; k < n_vectors && total; k++)
            all += vectors[k * n + i];
        if (total)
            total[i] = all;
    }
}

static void add_slices(const call *c, uint32_t sub, learn_sample *sample)
{
    const learn_input in = input_of(c, sub);
    const uint32_t n = c->args->part, keys = kvant_learn_key_slices(c->args),
                   slices = keys + kvant_learn_query_slices(c->args);
    float *sums = sums_of(c, sub);
    learn_make_rule(&in, sample, rule_of(c, sub));
    for (size_t i = 0; i < kvant_learn_vectors(c->args); i++)
        learn_make_vector(&in, (int)i, rule_of(c, sub));
    for (uint32_t slice = 0; slice < slices; slice++) {
        const bool is_key = slice < keys;
        const size_t first = (size_t)(is_key ? slice : slice - keys) * LEARN_SLICE,
                     end = is_key ? c->args->n_rows : (size_t)learn_n_queries(c->args),
                     some = end - first < LEARN_SLICE ? end - first : LEARN_SLICE;
        add_products(in.vectors + ((is_key ? 0 : c->args->n_rows) + first) * n, some, n,
                     sums + keys * n + (size_t)slice * n * n, is_key ? sums + slice * n : NULL);
    }
}

static void solve(const call *c, uint32_t transform, uint32_t sub)
{
    const kvant_cuda_learn_args *args = c->args;
    const uint32_t n = args->part, n_subs = args->n_kv_heads * c->parts;
    const size_t matrix = kvant_learn_matrix(n), at = (size_t)transform * n_subs + sub,
                 width = (size_t)args->n_kv_heads * args->head_dim;
    double *work = (double *)room_at(c, c->room.work) + at * 4 * matrix, small[LEARN_SMALL];
    float center[LEARN_MOST], start[LEARN_MOST], *sums = sums_of(c, sub);
    const learn_input in = input_of(c, sub);
    const uint32_t keys = kvant_learn_key_slices(args);
    const learn_sums of = { .counts = in.counts,
                            .n_keys = (int)args->n_rows,
                            .n_queries = learn_n_queries(args),
                            .key_slices = (int)keys,
                            .query_slices = (int)kvant_learn_query_slices(args),
                            .origin = rule_of(c, sub).origin,
                            .key = sums,
                            .keys = sums + (size_t)keys * n,
                            .queries = sums + (size_t)keys * n * (n + 1) };
    learn_space space = {
        .fast = work + 3 * matrix, .upper = work, .other = work + matrix, .third = work + 2 * matrix
    };
    learn_turns turns = { .pairs = args->pairs + sub % c->parts * (n / 2),
                          .n = (int)(n / 2),
                          .n_buckets = (int)args->spans[transform].n_buckets,
                          .edge = args->spans[transform].edges };
    learn_set_small(&space, small);
    learn_solve(&of, &turns, args->center_span, args->head_dim, &space, (int)n,
                args->triangles + at * kvant_triangle_size((size_t)n), center, start,
                (double *)room_at(c, c->room.balance) + 2 * at);
    for (uint32_t i = 0; i < n; i++) {
        const size_t channel = sub / c->parts * args->head_dim +
                               kvant_part_channel(args->head_dim, args->part, sub % c->parts, i);
        args->centers[transform * width + channel] = center[i];
        args->start[channel] = transform ? args->start[channel] : start[i];
    }
}

void learn_reference(const kvant_cuda_learn_args *args)
{
    const call c = { args, kvant_learn_room_of(args), args->head_dim / args->part };
    const uint32_t n_subs = args->n_kv_heads * c.parts, pairs = args->head_dim / 2;
    learn_sample *sample = malloc(sizeof *sample);
    for (uint32_t i = 0; i < (args->n_rows + args->n_tokens) * pairs; i++)
        learn_phase(args, (int)(i / pairs), (int)(i % pairs),
                    (float *)room_at(&c, c.room.phases) + 2 * (size_t)i);
    for (uint32_t sub = 0; sub < n_subs; sub++)
        add_slices(&c, sub, sample);
    free(sample);
    for (uint32_t transform = 0; transform < args->n_transforms; transform++) {
        for (uint32_t sub = 0; sub < n_subs; sub++)
            solve(&c, transform, sub);
        for (uint32_t head = 0; head < args->n_kv_heads && c.parts > 1; head++) {
            const size_t at = ((size_t)transform * args->n_kv_heads + head) * c.parts;
            learn_balance((int)args->part, (int)c.parts,
                          (double *)room_at(&c, c.room.balance) + 2 * at,
                          args->triangles + at * kvant_triangle_size((size_t)args->part));
        }
    }
}
