/* twins_attention.c - twins_attend of twins.h: compares the GPU's outputs with attention over the
 * bytes that the GPU exports.
 *
 * A sequence's blocks may have several transforms of centre and scale. The blocks of one transform
 * are a part: a fixture for attention_bound.c. Outputs of parts are merged by their log-sum-exp. */
#include "twins_stored.h"

#include "../unit/open_codec.h"

static bool same_transform(const stored_layer *all, uint32_t a, uint32_t b)
{
    for (int role = 0; role < 2; role++)
        if (memcmp(all->blocks[role][a].center, all->blocks[role][b].center,
                   sizeof(float[WIDTH])) != 0 ||
            memcmp(all->blocks[role][a].scale, all->blocks[role][b].scale, sizeof(float[WIDTH])) !=
                0)
            return false;
    return true;
}

/* parts[b]: the first block with the transform of block b. Returns the number of parts. */
static uint32_t find_parts(const stored_layer *all, uint32_t parts[MOST / 64])
{
    uint32_t n = 0;
    for (uint32_t b = 0; b < all->n_blocks; b++) {
        parts[b] = 0;
        while (!same_transform(all, parts[b], b))
            parts[b]++;
        n += parts[b] == b;
    }
    return n;
}

/* A codec whose rows before the rotation equal the rows in its pages after transform=file. */
static const kvant_codec *reference_codec(const twins *t, const stored_layer *all, kvant_role role,
                                          kvant_codec **made)
{
    *made = NULL;
    if (role == KVANT_ROLE_V || !t->spec->transformed)
        return all->codecs[role][0];
    assert_int_equal(kvant_codec_create(t->spec->transformed, DIM, KVANT_ROLE_K, 0, made, NULL, 0),
                     KVANT_OK);
    return *made;
}

/* R W (c / s). */
static void rotate_center(const stored_layer *all, const stored *block, kvant_role role, uint32_t h,
                          float rotated[DIM])
{
    float x[DIM];
    for (uint32_t j = 0; j < DIM; j++)
        x[j] = block->center[h * DIM + j] / block->scale[h * DIM + j];
    kvant_transform_forward(&all->codecs[role][h]->transform, kvant_kernels_get(KVANT_CPU_AUTO),
                            NULL, x, rotated);
}

/* Fills a page with the fp16 rows that the GPU reads if a block is exact for only keys or only
 * values. center: whether rows include it. */
static void fill_open_page(const fixture *f, const stored_layer *all, const stored *block,
                           kvant_role role, uint32_t b, bool center)
{
    const kvant_codec *codec = role == KVANT_ROLE_K ? f->cache.k : f->cache.v;
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    for (uint32_t h = 0; h < KV_HEADS; h++) {
        uint16_t *to = open_page(&f->open, role, b, h);
        float rotated[DIM] = { 0 }, y[DIM];
        if (center)
            rotate_center(all, block, role, h, rotated);
        for (uint32_t i = 0; i < 64; i++) {
            if (block->open)
                kernels->half_to_float(
                    (uint16_t *)(block->pages + h * f->open.page_bytes) + i * DIM, y, DIM);
            else
                kvant_codec_decode_transformed(codec, kernels,
                                               block->pages + h * codec->info.page_bytes, i, y);
            for (uint32_t j = 0; center && j < DIM; j++)
                y[j] += rotated[j];
            kernels->float_to_half(y, to + i * DIM, DIM);
        }
    }
}

/* With a softcap, keys get their centre back before they are multiplied. */
static bool centers_back(const stored_layer *all, const attention_problem *p)
{
    const kvant_center center = all->codecs[KVANT_ROLE_K][0]->info.center;
    bool any = center == KVANT_CENTER_FILE;
    for (uint32_t b = 0; b < all->n_blocks; b++)
        any |= center == KVANT_CENTER_FIRST && all->blocks[KVANT_ROLE_K][b].learnt;
    return any && p->softcap > 0;
}

/* Values with several centres get them back, too. */
static bool values_back(const stored_layer *all)
{
    bool several = false;
    for (uint32_t b = 1; b < all->n_blocks; b++)
        several |= memcmp(all->blocks[KVANT_ROLE_V][0].center, all->blocks[KVANT_ROLE_V][b].center,
                          sizeof(float[WIDTH])) != 0;
    return several;
}

/* A rotated centre adds <q, c> to a score. Compares two such sums of DIM products in binary32, with
 * rotated and with stored vectors. */
static void check_rotated(const stored_layer *all, const float *q, uint32_t n)
{
    for (uint32_t b = 0; b < all->n_blocks; b++)
        for (uint32_t i = 0; i < n * HEADS; i++) {
            const stored *block = &all->blocks[KVANT_ROLE_K][b];
            const uint32_t h = i % HEADS / (HEADS / KV_HEADS);
            const kvant_affine affine = { block->center + h * DIM, block->scale + h * DIM };
            float rotated[DIM], y[DIM];
            double sum = 0, want = 0, size = 0;
            rotate_center(all, block, KVANT_ROLE_K, h, rotated);
            assert_int_equal(
                kvant_codec_transform_query(all->codecs[KVANT_ROLE_K][h], &affine, q + i * DIM, y),
                KVANT_OK);
            for (uint32_t j = 0; j < DIM; j++) {
                sum += (double)y[j] * rotated[j];
                want += (double)q[i * DIM + j] * block->center[h * DIM + j];
                size += fabs((double)y[j] * rotated[j]) +
                        fabs((double)q[i * DIM + j] * block->center[h * DIM + j]);
            }
            if (!(fabs(sum - want) <= 0x1p-10 * size))
                fail_msg("a turned centre adds %g to a score instead of %g", sum, want);
        }
}

static void fill_block(const twins *t, fixture *f, const stored_layer *all, uint32_t b)
{
    const bool center[] = { centers_back(all, &f->p), values_back(all) };
    const bool open = center[0] || center[1] || all->blocks[0][b].open || all->blocks[1][b].open ||
                      t->spec->decoded;
    for (int role = 0; role < 2; role++)
        if (open)
            fill_open_page(f, all, &all->blocks[role][b], (kvant_role)role, b, center[role]);
        else
            memcpy(cache_page(&f->cache, (kvant_role)role, b, 0), all->blocks[role][b].pages,
                   all->blocks[role][b].bytes);
    f->table[f->blocks_per_row++] = open ? -1 - (int32_t)b : (int32_t)b;
}

static kvant_cuda_codec *gpu_codec(const kvant_codec *codec, bool open)
{
    kvant_cuda_codec *sealed, *of_open;
    assert_int_equal(kvant_cuda_codec_unrotated(codec, &sealed, NULL, 0), KVANT_OK);
    if (!open)
        return sealed;
    assert_int_equal(kvant_cuda_codec_create_open(sealed, &of_open), KVANT_OK);
    kvant_cuda_codec_free(&sealed);
    return of_open;
}

typedef struct part {
    fixture f;
    attention_case c;
    kvant_codec *made; /* the codec of reference_codec(), to be freed */
    int32_t length, table[MOST / 64];
    float k_scale[WIDTH], v_scale[WIDTH], v_center[WIDTH];
    const float *k_center; /* centres of all kv heads */
} part;

/* Makes a fixture of the blocks of one transform. The last block of the sequence may be partly
 * filled. */
static void part_open(part *p, twins *t, const stored_layer *all, const uint32_t *parts,
                      uint32_t transform_id, int32_t length, const attention_problem *problem,
                      int32_t *starts)
{
    kvant_codec *none;
    fixture *f = &p->f;
    const stored *k = &all->blocks[KVANT_ROLE_K][transform_id],
                 *v = &all->blocks[KVANT_ROLE_V][transform_id];
    *p = (part){ .c = { .k_spec = t->spec->k,
                        .v_spec = t->spec->v,
                        .head_dim = DIM,
                        .n_kv_heads = KV_HEADS,
                        .n_heads = HEADS,
                        .batch = 1,
                        .type = KVANT_CUDA_F32 } };
    p->k_center = k->center;
    p->c.lengths = &p->length;
    *f = (fixture){ .c = &p->c,
                    .p = *problem,
                    .n_rows = problem->query_tokens,
                    .n_matrices = 1,
                    .starts = starts,
                    .table = p->table };
    f->cache = (test_cache){ .head_dim = DIM, .n_kv_heads = KV_HEADS, .n_blocks = all->n_blocks };
    f->cache.k = (kvant_codec *)(uintptr_t)reference_codec(t, all, KVANT_ROLE_K, &p->made);
    f->cache.v = (kvant_codec *)(uintptr_t)reference_codec(t, all, KVANT_ROLE_V, &none);
    f->cache.k_info = f->cache.k->info, f->cache.v_info = f->cache.v->info;
    f->cache.gpu_k = gpu_codec(f->cache.k, t->spec->decoded);
    f->cache.gpu_v = gpu_codec(f->cache.v, t->spec->decoded);
    f->cache.v_offset = f->cache.k_info.page_bytes * KV_HEADS;
    f->cache.block_bytes = f->cache.v_offset + f->cache.v_info.page_bytes * KV_HEADS;
    f->cache.pool = calloc(all->n_blocks + 1, f->cache.block_bytes);
    f->open = (test_open_pool){ .n_kv_heads = KV_HEADS,
                                .n_blocks = all->n_blocks,
                                .page_bytes = 64 * DIM * 2 };
    assert_int_equal(open_codec_create(f->cache.k, &f->open.codec[0]), KVANT_OK);
    assert_int_equal(open_codec_create(f->cache.v, &f->open.codec[1]), KVANT_OK);
    f->open.pool = calloc(2 * KV_HEADS * (all->n_blocks + 1), f->open.page_bytes);
    for (uint32_t b = 0; b < all->n_blocks; b++)
        if (parts[b] == transform_id) {
            fill_block(t, f, all, b);
            p->length += length - 64 * (int32_t)b < 64 ? length - 64 * (int32_t)b : 64;
        }
    memcpy(p->k_scale, k->scale, sizeof p->k_scale);
    memcpy(p->v_scale, v->scale, sizeof p->v_scale);
    memcpy(p->v_center, v->center, sizeof p->v_center);
    f->k_scale = t->spec->transformed ? NULL : p->k_scale;
    f->v_scale = p->v_scale;
    f->center = values_back(all) ? NULL : p->v_center;
}

static void part_close(part *p)
{
    forget_rows(&p->f);
    open_codec_free(&p->f.open.codec[0]);
    open_codec_free(&p->f.open.codec[1]);
    kvant_codec_free(&p->made);
    kvant_cuda_codec_free(&p->f.cache.gpu_k);
    kvant_cuda_codec_free(&p->f.cache.gpu_v);
    free(p->f.cache.pool);
    free(p->f.open.pool);
}

/* The largest difference between sums of DIM products in binary32 in two orders. */
static double matrix_error(const kvant_codec *codec, const float *q)
{
    kvant_cuda_tables tables = { .size = sizeof tables };
    double worst = 0, largest = 0;
    assert_int_equal(kvant_cuda_codec_tables(codec, &tables), KVANT_OK);
    const float *matrix = tables.inverse_key_transform
                              ? tables.inverse_key_transform
                              : kvant_codec_get_view(codec)->transform.matrix;
    for (uint32_t i = 0; i < DIM; i++) {
        double row = 0, column = 0;
        for (uint32_t j = 0; j < DIM; j++) {
            row += fabs(matrix[i * DIM + j]);
            column += fabs(matrix[j * DIM + i]);
        }
        worst = fmax(worst, fmax(row, column));
        largest = fmax(largest, fabs(q[i]));
    }
    return 2 * (DIM + 2) * 0x1p-24 * worst * largest;
}

static bool is_rotated(const kvant_codec *codec)
{
    const kvant_transform_view *transform = &kvant_codec_get_view(codec)->transform;
    return transform->rotate == KVANT_ROTATE_DENSE &&
           (!transform->key_transform || transform->diagonal);
}

/* Rows of a rotation have length 1. A number of R q is a sum of DIM products whose magnitudes
 * add up to at most the length of q. For outputs, DIM numbers err by as much relative to their
 * length. */
static void note_rotation(fixture *f, const stored_layer *all, const float *q, uint32_t n,
                          bool several)
{
    const bool rotated = several || is_rotated(all->codecs[KVANT_ROLE_K][0]);
    for (uint32_t i = 0; rotated && i < n * HEADS; i++) {
        double squares = 0;
        for (uint32_t j = 0; j < DIM; j++)
            squares +=
                pow(q[i * DIM + j] *
                        (f->k_scale ? f->k_scale[i % HEADS / (HEADS / KV_HEADS) * DIM + j] : 1),
                    2);
        f->query_error = fmax(f->query_error, (DIM + 2) * 0x1p-24 * sqrt(squares));
    }
    if (is_rotated(all->codecs[KVANT_ROLE_V][0]))
        f->output_error = (DIM + 2) * 0x1p-24 * sqrt((double)DIM);
}

/* The reference uses queries after the matrix. */
static float *transform(const twins *t, fixture *f, const stored_layer *all, const float *q,
                        uint32_t n)
{
    float *to = malloc((size_t)n * Q_WIDTH * sizeof *to);
    memcpy(to, q, (size_t)n * Q_WIDTH * sizeof *to);
    for (uint32_t i = 0; t->spec->transformed && i < n * HEADS; i++) {
        const kvant_codec *codec = all->codecs[KVANT_ROLE_K][i % HEADS / (HEADS / KV_HEADS)];
        f->query_error = fmax(f->query_error, matrix_error(codec, q + i * DIM));
        assert_int_equal(kvant_codec_transform_query(codec, NULL, q + i * DIM, to + i * DIM),
                         KVANT_OK);
    }
    return to;
}

kvant_attention_problem problem_of(const fixture *f, uint32_t n, void *q, void *out)
{
    return (kvant_attention_problem){ .size = sizeof(kvant_attention_problem),
                                      .n_queries = n,
                                      .q = q,
                                      .q_token_stride = Q_WIDTH,
                                      .q_head_stride = DIM,
                                      .out = out,
                                      .out_token_stride = Q_WIDTH,
                                      .out_head_stride = DIM,
                                      .max_bias = f->p.max_bias,
                                      .window = f->p.window,
                                      .logit_softcap = f->p.softcap,
                                      .causal = f->p.causal };
}

static void make_mask(fixture *f, uint32_t n, int32_t length)
{
    f->mask_stride = (uint32_t)length + 5;
    f->mask = malloc((size_t)n * f->mask_stride * sizeof *f->mask);
    for (size_t i = 0; i < (size_t)n * f->mask_stride; i++)
        f->mask[i] = random_bits() % 8 == 0   ? 0xfc00  /* -inf */
                     : random_bits() % 2 == 0 ? 0x3800  /* 0.5 */
                                              : 0xb000; /* -0.125 */
}

/* The inputs and outputs of the GPU. */
typedef struct attended {
    uint32_t n;
    float *q, *sinks, *out, *lse;
    uint16_t *mask;
    uint32_t mask_stride;
    bool centers_back;
} attended;

/* Attends to the sequence as the last one in a batch with other sequences that are long enough. */
static void attend_all(twins *t, int32_t s, uint32_t layer, const attended *a, void *out)
{
    int32_t sequences[SEQUENCES];
    uint32_t n = 0;
    for (int32_t i = 0; i < SEQUENCES; i++)
        if (i != s && kvant_sequence_length(t->gpu, i, layer) >= a->n)
            sequences[n++] = i;
    sequences[n] = s;
    const size_t one = (size_t)a->n * Q_WIDTH;
    float *rows = random_rows((n + 1) * one, 1);
    memcpy(rows + n * one, a->q, one * sizeof *rows);
    float *q = device_copy(rows, (n + 1) * one * sizeof *rows),
          *outs = device_new((n + 1) * one * sizeof *rows, 0xff);
    if (kvant_cache_attend_batch(t->gpu, layer, sequences, n + 1, q, outs, a->n) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    check_cuda(cudaMemcpy(out, outs + n * one, one * sizeof *rows, cudaMemcpyDeviceToDevice));
    cudaFree(q);
    cudaFree(outs);
    free(rows);
}

static void attend_on_gpu(twins *t, int32_t s, uint32_t layer, const attention_problem *p,
                          attended *a)
{
    const uint32_t n = p->query_tokens, length = twins_length(t, s), first = t->dropped[s];
    const size_t bytes = (size_t)n * Q_WIDTH * sizeof(float),
                 lse_bytes = (size_t)n * HEADS * sizeof(float);
    fixture f = { .p = *p };
    *a = (attended){ .n = n,
                     .q = random_rows((size_t)n * Q_WIDTH, 1),
                     .out = malloc(bytes),
                     .lse = malloc(lse_bytes) };
    void *q = device_copy(a->q, bytes), *out = device_new(bytes, 0xff),
         *lse = device_new(lse_bytes, 0xff), *mask = NULL, *sinks = NULL;
    kvant_attention_problem problem = problem_of(&f, n, q, out);
    problem.lse = lse;
    if (p->mask) {
        make_mask(&f, n, (int32_t)length);
        a->mask = f.mask, a->mask_stride = f.mask_stride;
        problem.mask = mask = device_copy(f.mask, (size_t)n * f.mask_stride * sizeof *f.mask);
        problem.mask_token_stride = f.mask_stride;
        memmove(a->mask, a->mask + 64 * first,
                ((size_t)n * f.mask_stride - 64 * first) * sizeof *a->mask);
    }
    if (p->sinks) {
        a->sinks = random_rows(HEADS, 2);
        problem.sinks = sinks = device_copy(a->sinks, HEADS * sizeof *a->sinks);
    }
    if (kvant_cache_attention(t->gpu, layer, s, &problem) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    if (p->causal && !p->mask && !p->sinks && !p->window && p->softcap == 0 && p->max_bias == 0)
        attend_all(t, s, layer, a, out); /* writes the same outputs again */
    device_read(a->out, out, bytes);
    device_read(a->lse, lse, lse_bytes);
    void *of_gpu[] = { q, out, lse, mask, sinks };
    for (size_t i = 0; i < sizeof of_gpu / sizeof *of_gpu; i++)
        cudaFree(of_gpu[i]);
}

static void attended_free(attended *a)
{
    void *of_host[] = { a->q, a->sinks, a->out, a->lse, a->mask };
    for (size_t i = 0; i < sizeof of_host / sizeof *of_host; i++)
        free(of_host[i]);
}

/* <q, c> for a part's keys, and how far binary32 may be from it. */
static double of_center(const part *p, const float *q, uint32_t head, double *error)
{
    const float *c = p->k_center + head / (HEADS / KV_HEADS) * DIM;
    const double scale = 1 / sqrtf((float)DIM);
    double sum = 0, size = 0;
    for (uint32_t j = 0; j < DIM; j++) {
        sum += (double)q[j] * c[j];
        size += fabs((double)q[j] * c[j]);
    }
    *error = scale * size * (DIM + 2) * 0x1p-24;
    return scale * sum;
}

/* Parts have the weights e^lse, with <q, c> added, and a sink is a part without a value. If every
 * lse errs by at most delta, a weight errs by e^(2 delta) - 1 of itself. The kernel's own
 * exponentials and sums add 2^-20. */
static void check_merged(twins *t, part *parts, uint32_t n_parts, const attended *a, uint32_t i,
                         uint32_t head)
{
    static reference r[MOST / 64];
    double lse[MOST / 64], delta = 0x1p-20, top = a->sinks ? a->sinks[head] : -INFINITY;
    const float *q = a->q + (i * HEADS + head) * DIM, *got = a->out + (i * HEADS + head) * DIM;
    for (uint32_t p = 0; p < n_parts; p++) {
        double error;
        compute_reference(&parts[p].f, 0, i, head, &r[p]);
        lse[p] = r[p].lse + of_center(&parts[p], q, head, &error) * (a->centers_back ? 0 : 1);
        if (isinf(lse[p]))
            continue;
        delta = fmax(delta, r[p].lse_bound + error + 0x1p-20 * (1 + fabs(lse[p])));
        top = fmax(top, lse[p]);
    }
    double total = a->sinks ? exp(a->sinks[head] - top) : 0, want[DIM] = { 0 }, bound = 0,
           norms = 0, off = 0;
    for (uint32_t p = 0; p < n_parts && !isinf(top); p++) {
        const double w = exp(lse[p] - top);
        double norm = 0;
        for (uint32_t j = 0; j < DIM; j++) {
            want[j] += w * r[p].out[j];
            norm += r[p].out[j] * r[p].out[j];
        }
        total += w;
        bound += w * r[p].bound;
        norms += w * sqrt(norm);
    }
    for (uint32_t j = 0; j < DIM; j++)
        off += pow(got[j] - (total > 0 ? want[j] / total : 0), 2);
    bound = total > 0 ? (bound + (exp(2 * delta) - 1) * norms) / total : 0;
    if (!(sqrt(off) <= bound))
        fail_msg("%s / %s, %u parts, query %u, head %u: error %g, bound %g", t->spec->k, t->spec->v,
                 n_parts, i, head, sqrt(off), bound);
    t->worst = fmax(t->worst, bound > 0 ? sqrt(off) / bound : 0);
    const double want_lse = total > 0 ? top + log(total) : -INFINITY;
    if (!(a->lse[i * HEADS + head] == want_lse ||
          fabs(a->lse[i * HEADS + head] - want_lse) <= 2 * delta))
        fail_msg("%s / %s, %u parts: log-sum-exp %g, reference %g", t->spec->k, t->spec->v, n_parts,
                 a->lse[i * HEADS + head], want_lse);
}

/* A part's fixture does not know positions across parts, so problems of several parts do not depend
 * on positions. */
void twins_attend(twins *t, int32_t s, uint32_t layer, const attention_problem *problem)
{
    static stored_layer all;
    static part list[MOST / 64];
    uint32_t parts[MOST / 64], n = 0;
    attention_problem p = *problem;
    read_layer(t, s, layer, &all);
    const int32_t length = (int32_t)(twins_length(t, s) - 64 * t->dropped[s]);
    /* queries are multiplied by a matrix for each part */
    const bool several = find_parts(&all, parts) > 1;
    if (several)
        p = (attention_problem){ .query_tokens = 1,
                                 .causal = problem->causal,
                                 .softcap = problem->softcap,
                                 .sinks = problem->sinks };
    attended a;
    attend_on_gpu(t, s, layer, &p, &a);
    a.centers_back = centers_back(&all, &p);
    if (a.centers_back)
        check_rotated(&all, a.q, a.n);
    int32_t starts[2] = { 0, (int32_t)a.n };
    for (uint32_t b = 0; b < all.n_blocks; b++)
        if (parts[b] == b) {
            part_open(&list[n], t, &all, parts, b, length, &p, starts);
            note_rotation(&list[n].f, &all, a.q, a.n, several);
            list[n].f.q = transform(t, &list[n].f, &all, a.q, a.n);
            list[n].f.mask = a.mask, list[n].f.mask_stride = a.mask_stride;
            n++;
        }
    for (uint32_t i = 0; i < a.n; i++)
        for (uint32_t h = 0; h < HEADS; h++)
            check_merged(t, list, n, &a, i, h);
    t->most_parts = n > t->most_parts ? n : t->most_parts;
    for (uint32_t i = 0; i < n; i++) {
        free(list[i].f.q);
        part_close(&list[i]);
    }
    free_layer(&all);
    attended_free(&a);
}
