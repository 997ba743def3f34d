/* learn_reference.c - learning on the CPU by the GPU's own code (src/cuda/learn), with teams of one
 * thread. Sums of products have the order that they have on a GPU. Results have the GPU's bits. */
#include "learn_reference.h"

#include <string.h>

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

static float *sums_of(const call *c, uint32_t sub)
{
    return (float *)room_at(c, c->room.sums) + sub * kvant_learn_sums(c->args->part);
}

static learn_input input_of(const call *c, uint32_t sub)
{
    return (learn_input){ .args = c->args,
                          .kv_head = sub / c->parts,
                          .part = sub % c->parts,
                          .phases = room_at(c, c->room.phases),
                          .counts = (uint8_t *)room_at(c, c->room.flags) +
                                    sub * kvant_learn_vectors(c->args) };
}

static void add_products(const learn_input *in, bool is_key, const float *origin, float *sums,
                         float *total)
{
    const int n = (int)in->args->part,
              n_vectors = is_key ? (int)in->args->n_rows : learn_n_queries(in->args);
    float z[LEARN_MOST];
    for (int i = 0; i < n * n; i++)
        sums[i] = 0;
    for (int vector = 0; vector < n_vectors; vector++) {
        for (int i = 0; i < n / 2; i++) {
            const kvant_cuda_rope_pair p = learn_pair_at(in, i);
            const learn_two x = learn_addend(in, is_key, vector, i, origin);
            z[p.first] = x.first;
            z[p.second] = x.second;
        }
        for (int i = 0; i < n; i++)
            for (int j = 0; j <= i; j++)
                sums[i * n + j] = fmaf(z[i], z[j], sums[i * n + j]);
        for (int i = 0; i < n && is_key; i++)
            total[i] += z[i];
    }
}

static void sum(const call *c, uint32_t sub)
{
    const learn_input in = input_of(c, sub);
    const uint32_t n = c->args->part;
    uint32_t *counts = (uint32_t *)room_at(c, c->room.counts) + 2 * sub;
    float *sums = sums_of(c, sub), *queries = sums + 2 * n + n * n;
    learn_choice_space space;
    learn_choose(&in, &space, sums, counts);
    memset(sums + n, 0, n * sizeof *sums);
    add_products(&in, true, sums, sums + 2 * n, sums + n);
    if (c->args->n_tokens) {
        add_products(&in, false, sums, queries, NULL);
        return;
    }
    memset(queries, 0, n * n * sizeof *queries);
    for (uint32_t i = 0; i < n; i++)
        queries[i * n + i] = KVANT_CUDA_LEARN_LEAST;
    counts[1] = KVANT_CUDA_LEARN_LEAST;
}

static void solve(const call *c, uint32_t transform, uint32_t sub)
{
    const kvant_cuda_learn_args *args = c->args;
    const uint32_t n = args->part, n_subs = args->n_kv_heads * c->parts;
    const size_t matrix = kvant_learn_matrix(n), at = (size_t)transform * n_subs + sub,
                 width = (size_t)args->n_kv_heads * args->head_dim;
    double *work = (double *)room_at(c, c->room.work) + at * 4 * matrix, small[LEARN_SMALL];
    float center[LEARN_MOST], start[LEARN_MOST], *sums = sums_of(c, sub);
    const learn_sums of = { (uint32_t *)room_at(c, c->room.counts) + 2 * sub, sums, sums + n,
                            sums + 2 * n, sums + 2 * n + n * n };
    learn_space space = {
        .fast = work + 3 * matrix, .upper = work, .other = work + matrix, .third = work + 2 * matrix
    };
    learn_turns turns = { .pairs = args->pairs + sub % c->parts * (n / 2),
                          .n = (int)(n / 2),
                          .n_buckets = (int)args->spans[transform].n_buckets,
                          .edge = args->spans[transform].edges };
    learn_set_small(&space, small);
    learn_solve(&of, &turns, args->center_span, args->head_dim, &space, (int)n,
                args->triangles + at * LEARN_TRIANGLE(n), center, start,
                (double *)room_at(c, c->room.balance) + 2 * at);
    for (uint32_t i = 0; i < n; i++) {
        const size_t channel =
            sub / c->parts * args->head_dim + learn_channel(args, sub % c->parts, i);
        args->centers[transform * width + channel] = center[i];
        args->start[channel] = transform ? args->start[channel] : start[i];
    }
}

void learn_reference(const kvant_cuda_learn_args *args)
{
    const call c = { args, kvant_learn_room_of(args), args->head_dim / args->part };
    const uint32_t n_subs = args->n_kv_heads * c.parts, pairs = args->head_dim / 2;
    for (uint32_t i = 0; i < (args->n_rows + args->n_tokens) * pairs; i++)
        learn_phase(args, (int)(i / pairs), (int)(i % pairs),
                    (float *)room_at(&c, c.room.phases) + 2 * (size_t)i);
    for (uint32_t sub = 0; sub < n_subs; sub++)
        sum(&c, sub);
    for (uint32_t transform = 0; transform < args->n_transforms; transform++) {
        for (uint32_t sub = 0; sub < n_subs; sub++)
            solve(&c, transform, sub);
        for (uint32_t head = 0; head < args->n_kv_heads && c.parts > 1; head++) {
            const size_t at = ((size_t)transform * args->n_kv_heads + head) * c.parts;
            learn_balance((int)args->part, (int)c.parts,
                          (double *)room_at(&c, c.room.balance) + 2 * at,
                          args->triangles + at * LEARN_TRIANGLE(args->part));
        }
    }
}
