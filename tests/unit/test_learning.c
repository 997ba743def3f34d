/* test_learning.c - transform=first: matrices from keys and queries, several transforms, hostile
 * first rows, and blocks that move. */
#include "tensor_fixture.h"

#include "../../src/base/fnv.h"
#include "../../src/cache/learning.h"
#include "../../src/cache/center.h"
#include "../../src/cache/key_transform.h"

/* Any number of readers may use a const tensor at once, so a function that changes a tensor does
 * not take a const tensor. */
#define CHANGES(function, type)                                                                    \
    _Static_assert(_Generic(&function, type: 1, default: 0), #function " takes a const tensor")
typedef kvant_status prepares_transform(kvant_tensor *, uint32_t);
typedef void ages_transforms(kvant_tensor *, size_t);
typedef void recalls_centers(kvant_tensor *, uint32_t);
CHANGES(kvant_transforms_prepare, prepares_transform *);
CHANGES(kvant_transforms_age, ages_transforms *);
CHANGES(kvant_centers_recall, recalls_centers *);

enum { BLOCKS = 40, MOST = BLOCKS * 64, GROUP = 3, N_HEADS = GROUP * N_KV_HEADS, HEADER = 40 };

static const char spec[] = "turboquant-4:transform=first",
                  plain[] = "turboquant-4:center=first,norm=first";

/* Keys and queries with correlated channels: each is a fixed matrix times latent numbers of falling
 * size. Keys lie around a centre. */
typedef struct kind {
    float keys[HEAD_DIM * HEAD_DIM], queries[HEAD_DIM * HEAD_DIM], center[WIDTH];
} kind;

static kind make_kind(uint64_t seed)
{
    kind k;
    fill_normal(k.keys, COUNT(k.keys), &seed);
    fill_normal(k.queries, COUNT(k.queries), &seed);
    fill_normal(k.center, COUNT(k.center), &seed);
    for (uint32_t j = 0; j < WIDTH; j++)
        k.center[j] *= 20;
    return k;
}

static void fill(const float *matrix, const float *center, size_t n_heads, size_t n, uint64_t *rng,
                 float *out)
{
    for (size_t i = 0; i < n * n_heads; i++)
        for (uint32_t j = 0; j < HEAD_DIM; j++)
            out[i * HEAD_DIM + j] = center ? center[i % n_heads * HEAD_DIM + j] : 0;
    for (size_t i = 0; i < n * n_heads; i++)
        for (uint32_t l = 0; l < HEAD_DIM; l++) {
            const float latent = test_normal(rng) * exp2f(-0.2f * (float)l);
            for (uint32_t j = 0; j < HEAD_DIM; j++)
                out[i * HEAD_DIM + j] += matrix[j * HEAD_DIM + l] * latent;
        }
}

typedef struct text {
    float rows[MOST * WIDTH], queries[MOST * N_HEADS * HEAD_DIM];
} text;

static text *make_text(const kind *k, uint64_t seed)
{
    text *t = malloc(sizeof *t);
    assert_non_null(t);
    fill(k->keys, k->center, N_KV_HEADS, MOST, &seed, t->rows);
    fill(k->queries, NULL, N_HEADS, MOST, &seed, t->queries);
    return t;
}

static void note(const fixture *f, const float *queries, uint32_t n, uint32_t n_threads)
{
    const kvant_queries q = { .size = sizeof q,
                              .q = queries,
                              .token_stride = (size_t)N_HEADS * HEAD_DIM,
                              .head_stride = HEAD_DIM,
                              .n_tokens = n,
                              .n_heads = N_HEADS };
    assert_int_equal(kvant_tensor_note_queries(f->tensor, &q, n_threads), KVANT_OK);
}

/* Writes tokens first .. first + n - 1 of the text to the slots of the same numbers, queries before
 * keys. */
static void put(fixture *f, const text *t, uint32_t first, uint32_t n, uint32_t batch,
                uint32_t n_threads)
{
    for (uint32_t i = first; i < first + n; i += batch) {
        const uint32_t m = first + n - i < batch ? first + n - i : batch;
        note(f, t->queries + (size_t)i * N_HEADS * HEAD_DIM, m, n_threads);
        write_rows(f, i, m, t->rows + (size_t)i * WIDTH, m, n_threads);
    }
}

/* Root mean square error of the scores of each slot's row with one of the text's queries. */
static double score_error(const fixture *f, const text *t, uint32_t first, uint32_t n)
{
    double sum = 0;
    for (uint32_t slot = first; slot < first + n; slot++) {
        float got[WIDTH];
        read_slot(f, slot, got);
        for (uint32_t h = 0; h < N_HEADS; h++) {
            const float *q = t->queries + ((size_t)(slot * 7 % MOST) * N_HEADS + h) * HEAD_DIM;
            const size_t at = h / GROUP * HEAD_DIM;
            double error = 0;
            for (uint32_t j = 0; j < HEAD_DIM; j++)
                error += (double)q[j] * (got[at + j] - f->rows[(size_t)slot * WIDTH + at + j]);
            sum += error * error;
        }
    }
    return sqrt(sum / ((double)n * N_HEADS));
}

static bool has_matrix(const fixture *f, uint32_t block)
{
    return f->tensor->transforms[block_of(f, block, 0).transform_id].key_transform != NULL;
}

static fixture make_values(const char *values_spec)
{
    return make_heads(values_spec, values_spec, KVANT_ROLE_V, 1, BLOCKS, 0);
}

static double row_error(const fixture *f, uint32_t first, uint32_t n)
{
    double sum = 0;
    for (uint32_t slot = first; slot < first + n; slot++) {
        float got[WIDTH];
        read_slot(f, slot, got);
        for (uint32_t j = 0; j < WIDTH; j++)
            sum += (got[j] - f->rows[(size_t)slot * WIDTH + j]) *
                   (double)(got[j] - f->rows[(size_t)slot * WIDTH + j]);
    }
    return sqrt(sum / n);
}

static void matrices_make_errors_of_scores_small(void **state)
{
    const kind k = make_kind(1);
    text *t = make_text(&k, 2);
    fixture f = make(spec, 1, BLOCKS, 0), g = make(plain, 1, BLOCKS, 0);
    (void)state;
    assert_true(kvant_tensor_wants_queries(f.tensor, 1));
    assert_false(kvant_tensor_wants_queries(g.tensor, 200));
    put(&f, t, 0, 448, 448, 2);
    put(&g, t, 0, 448, 448, 2);
    assert_true(has_matrix(&f, 1) && !has_matrix(&g, 1));
    assert_int_equal(block_of(&f, 0, 0).state, KVANT_BLOCK_SINK);
    assert_true(score_error(&f, t, 64, 384) < 0.7 * score_error(&g, t, 64, 384));
    drop(&f);
    drop(&g);
    free(t);
}

/* Values learn a matrix without queries, and then outputs of attention, which are sums of values,
 * err less. A centre in the spec stays, with its page of fp16. */
static void values_get_matrices_without_queries(void **state)
{
    const kind k = make_kind(31);
    text *t = make_text(&k, 32);
    fixture f = make_values(spec), g = make_values("turboquant-4:norm=first"),
            h = make_values("turboquant-4:transform=first,center=first");
    fixture *all[] = { &f, &g, &h };
    (void)state;
    for (size_t i = 0; i < COUNT(all); i++) {
        assert_false(kvant_tensor_wants_queries(all[i]->tensor, 200));
        write_rows(all[i], 0, 448, t->rows, 448, 2);
    }
    assert_true(has_matrix(&f, 1) && !has_matrix(&g, 1) && has_matrix(&h, 1));
    assert_int_equal(block_of(&f, 0, 0).state, KVANT_BLOCK_SEALED);
    assert_int_equal(block_of(&h, 0, 0).state, KVANT_BLOCK_SINK);
    assert_null(block_of(&f, 1, 0).affine.center);
    assert_non_null(block_of(&h, 1, 0).affine.center);
    assert_true(row_error(&f, 64, 384) < 0.9 * row_error(&g, 64, 384));
    assert_true(row_error(&h, 64, 384) < row_error(&f, 64, 384));
    for (size_t i = 0; i < COUNT(all); i++)
        drop(all[i]);
    free(t);
}

/* If nobody adds queries, or no query is finite, the codec has only centre and scale. */
static void without_queries_there_are_factors(void **state)
{
    const kind k = make_kind(3);
    text *t = make_text(&k, 4);
    (void)state;
    for (int queries = 0; queries < 2; queries++) {
        fixture f = make(spec, 1, BLOCKS, 0), g = make(plain, 1, BLOCKS, 0);
        for (size_t i = 0; i < (size_t)N_HEADS * 200; i++)
            t->queries[i * HEAD_DIM + i % HEAD_DIM] = i % 2 ? NAN : 1e30f;
        if (queries)
            note(&f, t->queries, 200, 1);
        write_rows(&f, 0, 200, t->rows, 200, 1);
        write_rows(&g, 0, 200, t->rows, 200, 1);
        assert_same_pages(&f, &g, 4);
        drop(&f);
        drop(&g);
    }
    free(t);
}

/* The second matrix is for new blocks. A third matrix for the same rows would not help enough, and
 * single tokens are no longer examined. Rows of another kind get a matrix of their own. */
static void later_matrices_are_for_later_blocks(void **state)
{
    const kind k = make_kind(5), other = make_kind(6);
    text *t = make_text(&k, 7), *u = make_text(&other, 8);
    fixture f = make(spec, 1, BLOCKS, 0);
    (void)state;
    put(&f, t, 0, 80, 80, 2);
    exported before = export_block(&f, 1);
    put(&f, t, 128, 1920, 256, 2);
    exported after = export_block(&f, 1);
    assert_int_equal(before.bytes, after.bytes);
    assert_memory_equal(before.data, after.data, after.bytes);
    assert_int_not_equal(block_of(&f, 1, 0).transform_id, block_of(&f, 31, 0).transform_id);
    assert_true(has_matrix(&f, 1) && has_matrix(&f, 31));
    assert_false(kvant_tensor_wants_queries(f.tensor, 1));
    assert_int_equal(tensor_info_of(&f).n_transforms, 3);
    assert_true(score_error(&f, t, 1024, 256) < score_error(&f, t, 128, 256));
    fixture g = make(spec, 1, BLOCKS, 0); /* a tensor with the second kind alone */
    memcpy(g.rows, f.rows, MOST * WIDTH * sizeof *g.rows);
    put(&g, u, 2048, 256, 256, 2);
    put(&f, u, 2048, 256, 256, 2);
    assert_int_equal(tensor_info_of(&f).n_transforms, 4);
    assert_true(has_matrix(&f, 32));
    assert_false(kvant_tensor_wants_queries(f.tensor, 1));
    assert_true(score_error(&f, u, 2048, 256) <=
                1.3 * score_error(&g, u, 2048, 256)); /* the tensor has seen only a few queries */
    kvant_tensor_clear(f.tensor);
    assert_int_equal(tensor_info_of(&f).n_transforms, 1);
    put(&f, t, 0, 80, 80, 2);
    exported again = export_block(&f, 1);
    assert_int_equal(before.bytes, again.bytes);
    assert_memory_equal(before.data, again.data, again.bytes);
    free(before.data);
    free(after.data);
    free(again.data);
    drop(&f);
    drop(&g);
    free(t);
    free(u);
}

/* One token at a time: the 64th row makes the first version. */
static void single_tokens_are_learnt_from(void **state)
{
    const kind k = make_kind(9);
    text *t = make_text(&k, 10);
    fixture f = make(spec, 1, BLOCKS, 0), g = make(plain, 1, BLOCKS, 0);
    (void)state;
    put(&f, t, 0, 63, 1, 1);
    assert_int_equal(tensor_info_of(&f).n_transforms, 1);
    put(&f, t, 63, 700, 1, 1);
    put(&g, t, 0, 763, 1, 1);
    assert_true(has_matrix(&f, 1) && has_matrix(&f, 11));
    assert_true(score_error(&f, t, 640, 120) < 0.7 * score_error(&g, t, 640, 120));
    drop(&f);
    drop(&g);
    free(t);
}

static uint32_t queries_seen(const fixture *f)
{
    const sub_head_moments *u = &f->tensor->learning->sub_heads[0];
    return u->n_queries + u->n_pending + f->tensor->learning->n_pending_tokens * GROUP;
}

/* One in eight later tokens counts, whether its queries are added before its row or after it. */
static void single_tokens_queries_count_before_and_behind_rows(void **state)
{
    enum { N_ENOUGH = 200, N_MORE = 160 };
    (void)state;
    for (int behind = 0; behind < 2; behind++) {
        const kind k = make_kind(3);
        text *t = make_text(&k, 9);
        fixture f = make(spec, 1, BLOCKS, 0);
        uint32_t enough = 0;
        for (uint32_t i = 0; i < N_ENOUGH + N_MORE; i++) {
            if (i == N_ENOUGH)
                enough = queries_seen(&f);
            if (!behind)
                note(&f, t->queries + (size_t)i * N_HEADS * HEAD_DIM, 1, 1);
            write_rows(&f, i, 1, t->rows + (size_t)i * WIDTH, 1, 1);
            if (behind)
                note(&f, t->queries + (size_t)i * N_HEADS * HEAD_DIM, 1, 1);
        }
        assert_int_equal(queries_seen(&f) - enough, N_MORE / 8 * GROUP);
        drop(&f);
        free(t);
    }
}

/* The first rows are nearly one row, then text follows. The text is stored as well as it is
 * alone. */
static void hostile_first_rows_do_not_spoil(void **state)
{
    static const struct {
        uint32_t n, batch;
        float spread;
    } starts[] = { { 200, 200, 0 }, { 200, 200, 1e-3f }, { 70, 1, 0 }, { 512, 512, 0.05f } };
    const kind k = make_kind(11);
    text *t = make_text(&k, 12), *hostile = make_text(&k, 13);
    fixture alone = make(spec, 1, BLOCKS, 0);
    (void)state;
    put(&alone, t, 512, 512, 256, 2);
    for (size_t i = 0; i < COUNT(starts); i++) {
        uint64_t rng = 14;
        fixture f = make(spec, 1, BLOCKS, 0);
        for (size_t j = WIDTH; j < MOST * WIDTH; j++)
            hostile->rows[j] =
                hostile->rows[j % WIDTH] + starts[i].spread * test_normal(&rng) * (j % 3 == 0);
        for (size_t j = N_HEADS * HEAD_DIM; j < COUNT(hostile->queries); j++)
            hostile->queries[j] = hostile->queries[j % (N_HEADS * HEAD_DIM)];
        put(&f, hostile, 0, starts[i].n, starts[i].batch, 2);
        put(&f, t, 512, 512, 256, 2);
        assert_true(score_error(&f, t, 576, 448) <= 1.2 * score_error(&alone, t, 576, 448));
        drop(&f);
    }
    drop(&alone);
    free(t);
    free(hostile);
}

/* Repeats row 0 at the next positions, rotated by RoPE as a model's keys and queries are. */
static void repeat_rotated(float *rows, uint32_t n_heads, uint32_t n)
{
    const uint32_t half = HEAD_DIM / 2;
    for (uint32_t t = 1; t < n; t++)
        for (uint32_t j = 0; j < n_heads * half; j++) {
            const float angle = (float)t * powf(10000, -(float)(j % half) / (float)half);
            const float *from = rows + j / half * HEAD_DIM + j % half;
            float *to = rows + (size_t)t * n_heads * HEAD_DIM + j / half * HEAD_DIM + j % half;
            to[0] = from[0] * cosf(angle) - from[half] * sinf(angle);
            to[half] = from[0] * sinf(angle) + from[half] * cosf(angle);
        }
}

/* A long prompt of one repeated token, whose blocks stay, then text in some of these blocks. The
 * text is stored as well as it is alone. */
static void a_long_monotonous_prompt_leaves_a_place(void **state)
{
    const kind k = make_kind(23), other = make_kind(24);
    text *t = make_text(&k, 25), *hostile = make_text(&other, 26);
    fixture f = make(spec, 1, BLOCKS, 0), alone = make(spec, 1, BLOCKS, 0);
    (void)state;
    repeat_rotated(hostile->rows, N_KV_HEADS, MOST);
    repeat_rotated(hostile->queries, N_HEADS, MOST);
    put(&f, hostile, 0, MOST, 512, 2);
    put(&f, t, 0, 256, 256, 2);
    put(&alone, t, 0, 256, 256, 2);
    assert_true(score_error(&f, t, 64, 192) <= 1.2 * score_error(&alone, t, 64, 192));
    drop(&f);
    drop(&alone);
    free(t);
    free(hostile);
}

/* A few rows and queries far from all others. */
static void outliers_do_not_spoil(void **state)
{
    const kind k = make_kind(15);
    text *t = make_text(&k, 16), *u = make_text(&k, 16);
    fixture f = make(spec, 1, BLOCKS, 0), g = make(spec, 1, BLOCKS, 0);
    (void)state;
    for (uint32_t i = 100; i < 500; i += 90)
        for (uint32_t j = 0; j < WIDTH; j++)
            u->rows[(size_t)i * WIDTH + j] *= 100;
    put(&f, t, 0, 1024, 512, 2);
    put(&g, u, 0, 1024, 512, 2);
    assert_true(score_error(&g, t, 512, 512) <= 1.2 * score_error(&f, t, 512, 512));
    drop(&f);
    drop(&g);
    free(t);
    free(u);
}

static void threads_do_not_change_bytes(void **state)
{
    const kind k = make_kind(17);
    text *t = make_text(&k, 18);
    fixture f = make(spec, 1, BLOCKS, 0), g = make(spec, 1, BLOCKS, 0);
    (void)state;
    put(&f, t, 0, 1200, 300, 1);
    put(&g, t, 0, 1200, 300, 4);
    assert_alike(&f, &g);
    drop(&f);
    drop(&g);
    free(t);
}

/* Rows that are refused change no byte that follows. */
static void refused_rows_leave_no_trace(void **state)
{
    const kind k = make_kind(19);
    text *t = make_text(&k, 20);
    float *bad = malloc(100 * WIDTH * sizeof *bad);
    fixture f = make(spec, 1, BLOCKS, 0), g = make(spec, 1, BLOCKS, 0);
    (void)state;
    for (int i = 0; i < 2; i++) {
        memcpy(bad, t->rows, 100 * WIDTH * sizeof *bad);
        bad[70 * WIDTH + 3] = i ? NAN : 1e30f;
        assert_int_equal(try_write(&f, 0, 100, bad, 1), i ? KVANT_ERR_NONFINITE : KVANT_ERR_RANGE);
        assert_int_equal(tensor_info_of(&f).n_transforms, 1);
    }
    put(&f, t, 0, 600, 200, 1);
    put(&g, t, 0, 600, 200, 1);
    assert_alike(&f, &g);
    free(bad);
    drop(&f);
    drop(&g);
    free(t);
}

static void check_refused(const fixture *f, const exported *e, size_t at, uint16_t half)
{
    uint8_t *data = malloc(e->bytes);
    memcpy(data, e->data, e->bytes);
    memcpy(data + at, &half, sizeof half);
    const uint64_t check = kvant_fnv1a(KVANT_FNV_START, data, e->bytes - sizeof check);
    memcpy(data + e->bytes - sizeof check, &check, sizeof check);
    assert_int_equal(kvant_tensor_import(f->tensor, 3, data, e->bytes), KVANT_ERR_FORMAT);
    free(data);
}

/* Exported blocks contain their matrices. A block whose matrix has no good inverse is refused. */
static void moved_blocks_keep_matrices_of(kvant_role role)
{
    static const uint16_t bad[] = { 0, 0x8000, 0xbc00, 0x7c00,
                                    0x7e00 }; /* 0, -0, -1, infinity, NaN */
    const kind k = make_kind(21);
    text *t = make_text(&k, 22);
    fixture f = make_heads(spec, spec, role, 1, BLOCKS, 0), g = make_like(&f), h = make_like(&f);
    const size_t matrix = HEADER + 2 * WIDTH * sizeof(float);
    put(&f, t, 0, 1100, 256, 2);
    for (uint32_t block = 0; block < BLOCKS; block++) {
        exported e = export_block(&f, block);
        assert_int_equal(kvant_tensor_import(g.tensor, block, e.data, e.bytes), KVANT_OK);
        for (size_t i = 0; i < COUNT(bad) && block == 3; i++)
            check_refused(&h, &e, matrix, bad[i]);
        free(e.data);
    }
    assert_int_equal(tensor_info_of(&h).written_blocks, 0);
    assert_int_equal(tensor_info_of(&g).n_transforms, tensor_info_of(&f).n_transforms);
    assert_int_equal(kvant_tensor_copy(f.tensor, 0, h.tensor, 0, BLOCKS), KVANT_OK);
    for (uint32_t block = 0; block < BLOCKS; block++) {
        exported e = export_block(&f, block), imported = export_block(&g, block),
                 copied = export_block(&h, block);
        assert_int_equal(e.bytes, imported.bytes);
        assert_memory_equal(e.data, imported.data, e.bytes);
        assert_int_equal(e.bytes, copied.bytes);
        assert_memory_equal(e.data, copied.data, e.bytes);
        free(e.data);
        free(imported.data);
        free(copied.data);
    }
    for (uint32_t slot = 0; slot < 1100; slot += 9) {
        float a[WIDTH], b[WIDTH];
        read_slot(&f, slot, a);
        read_slot(&g, slot, b);
        assert_memory_equal(a, b, sizeof a);
    }
    kvant_tensor_free(&g.tensor);
    free(g.memory);
    free(g.rows);
    kvant_tensor_free(&h.tensor);
    free(h.memory);
    free(h.rows);
    drop(&f);
    free(t);
}

static void moved_blocks_keep_their_matrices(void **state)
{
    (void)state;
    moved_blocks_keep_matrices_of(KVANT_ROLE_K);
    moved_blocks_keep_matrices_of(KVANT_ROLE_V);
}

/* The CPU multiplies rows with the (R W)^T that a codec of the same transform has. A GPU uses the
 * codec's. */
static void check_expanded(const kvant_tensor *tensor, const kvant_key_transform *key_transform,
                           const float *square)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    kvant_transform whole = key_transform->transforms[0];
    const uint32_t d = tensor->head_dim;
    const bool dense = whole.rotate == KVANT_ROTATE_DENSE;
    float x[3 * 512], some[3 * 512], all[3 * 512], *copy = malloc((size_t)d * d * sizeof *copy);
    assert_non_null(copy);
    assert_int_equal(kvant_transform_expands(&whole), whole.part == d && !dense);
    assert_true(dense || !key_transform->expanded);
    if (kvant_transform_expands(&whole)) {
        for (uint32_t i = 0; i < 3 * d; i++)
            x[i] = i % 7 ? (float)(i * 37u % 101u) - 50 : 0;
        kvant_transform_expand(&whole, copy);
        assert_memory_equal(copy, square, (size_t)d * d * sizeof *square);
        kvant_transform_apply_rows(&whole, kernels, 3, x, some);
        whole.key_transform = copy;
        kvant_transform_apply_rows(&whole, kernels, 3, x, all);
        assert_memory_equal(some, all, 3 * (size_t)d * sizeof *some);
    }
    free(copy);
}

/* A transform has its triangles, and also (R W)^T where R is dense, as long as rows are written
 * with it. */
static void check_kept(kvant_tensor *tensor, kvant_key_transform *key_transform, const float *x,
                       const float *y)
{
    const uint32_t d = tensor->head_dim;
    const size_t center_and_scale = 2 * kvant_tensor_width(tensor) * sizeof(float);
    const size_t least = kvant_key_transform_halves(tensor) * sizeof(uint16_t) + center_and_scale;
    const kvant_transform *transform = &key_transform->transforms[0];
    const bool kept = transform->rotate == KVANT_ROTATE_DENSE && transform->part == d;
    const size_t square = kept ? (size_t)d * d * sizeof(float) : 0;
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    kvant_transform made = tensor->codecs[0]->transform;
    float z[512];
    tensor->transforms[1].key_transform = key_transform;
    assert_int_equal(kvant_transforms_set_matrix(tensor, 1, 0, &made), KVANT_OK);
    for (int again = 0; again < 2; again++) {
        assert_int_equal(kvant_transforms_prepare(tensor, 1), KVANT_OK);
        kvant_transforms_age(tensor, 1);
        assert_in_range(kvant_key_transform_bytes(tensor), least + square, least + square + 512);
        check_expanded(tensor, key_transform, made.key_transform);
        kvant_transforms_age(tensor, 512);
        kvant_transforms_age(tensor, 1);
        assert_null(key_transform->expanded);
        assert_in_range(kvant_key_transform_bytes(tensor), least, least + 512);
        kvant_transform_forward(&key_transform->transforms[0], kernels, NULL, x, z);
        for (uint32_t j = 0; j < d; j++)
            assert_true(fabsf(z[j] - y[j]) <= 1e-4f);
    }
    free(made.key_transform);
}

/* Beyond 128 channels W is block diagonal. Rows read back and scores stay right in all parts. */
static void large_heads_have_parts(void **state)
{
    static const struct {
        uint32_t head_dim, part;
    } dims[] = { { 64, 64 },  { 80, 80 },  { 96, 96 },  { 127, 127 }, { 128, 128 }, { 256, 64 },
                 { 512, 64 }, { 192, 64 }, { 160, 40 }, { 136, 34 },  { 255, 255 } };
    uint64_t rng = 23;
    (void)state;
    for (size_t i = 0; i < COUNT(dims); i++) {
        const uint32_t d = dims[i].head_dim, n = dims[i].part;
        kvant_codec *codec = make_codec(spec, d, KVANT_ROLE_K);
        kvant_tensor tensor = { .codecs = (const kvant_codec *[]){ codec },
                                .n_kv_heads = 1,
                                .head_dim = d };
        const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
        kvant_key_transform *key_transform;
        float x[512], q[512], y[512], p[512], back[512];
        assert_int_equal(kvant_key_transform_part(d), n);
        uint16_t *triangles = malloc(kvant_key_transform_halves(&tensor) * sizeof *triangles),
                 *at = triangles;
        for (uint32_t part = 0; part < d / n; part++)
            for (uint32_t row = 0; row < n; row++)
                for (uint32_t j = 0; j <= row; j++)
                    *at++ = row == j ? (uint16_t)(0x3800 + test_random(&rng) % 0x800)
                                     : (uint16_t)(0x2000 + test_random(&rng) % 0x400);
        assert_ptr_equal(at, triangles + kvant_key_transform_halves(&tensor));
        assert_int_equal(kvant_key_transform_create(&tensor, triangles, 2, &key_transform),
                         KVANT_OK);
        fill_normal(x, d, &rng);
        fill_normal(q, d, &rng);
        kvant_transform_forward(&key_transform->transforms[0], kernels, NULL, x, y);
        kvant_transform_dual(&key_transform->transforms[0], kernels, 1, q, p);
        kvant_transform_inverse(&key_transform->transforms[0], kernels, NULL, y, back);
        double score = 0, other = 0, lengths = 0, error = 0, gain = 0, length = 0;
        for (uint32_t j = 0; j < d; j++) {
            score += (double)x[j] * q[j];
            other += (double)y[j] * p[j];
            lengths += fabs((double)y[j] * p[j]);
            error = fmax(error, fabs(back[j] - x[j]));
            gain += (double)y[j] * y[j];
            length += (double)x[j] * x[j];
        }
        assert_true(fabs(score - other) <= 1e-4 * lengths && error <= 1e-4);
        assert_true(gain <=
                    pow(kvant_transform_gain(&key_transform->transforms[0]), 2) * length * 1.0001);
        check_kept(&tensor, key_transform, x, y);
        kvant_key_transform_free(&key_transform);
        assert_null(key_transform);
        free(triangles);
        kvant_codec_free(&codec);
    }
}

static void parts_have_every_channel_once(void **state)
{
    static const uint32_t dims[] = { 17, 63, 64, 127, 128, 129, 136, 192, 255, 256, 512 };
    (void)state;
    for (size_t i = 0; i < COUNT(dims); i++) {
        const uint32_t d = dims[i], n = kvant_key_transform_part(d);
        float x[512], part[512], back[512] = { 0 };
        for (uint32_t j = 0; j < d; j++)
            x[j] = (float)(j + 1);
        for (uint32_t p = 0; p < d / n; p++) {
            memset(part, 0, sizeof part);
            kvant_part_gather(d, n, p, x, part);
            for (uint32_t j = 0; j < n; j++)
                assert_true(part[j] == x[kvant_part_channel(d, n, p, j)]);
            kvant_part_scatter(d, n, p, part, back);
        }
        assert_memory_equal(back, x, d * sizeof *x);
    }
}

/* A block's transform as a codec, here with another quantiser. Both must agree on rows, queries and
 * pages. */
static void a_transform_is_a_codec(void **state)
{
    const kind k = make_kind(40);
    text *t = make_text(&k, 41);
    fixture f = make(spec, 1, BLOCKS, 0);
    kvant_codec *like, *made;
    uint8_t page[64 * 64 * 4];
    (void)state;
    assert_int_equal(
        kvant_codec_create("trellis-4:transform=first", HEAD_DIM, KVANT_ROLE_K, 0, &like, NULL, 0),
        KVANT_OK);
    put(&f, t, 0, 320, 320, 1);
    for (uint32_t h = 0; h < N_KV_HEADS; h++) {
        const kvant_block_info block = block_of(&f, 2, h);
        assert_int_equal(kvant_tensor_make_codec(f.tensor, 2, h, block.codec, &made), KVANT_OK);
        memset(page, 0, sizeof page);
        assert_memory_equal(made->view.transform.center, block.affine.center,
                            HEAD_DIM * sizeof(float));
        assert_int_equal(
            kvant_codec_encode(made, &(kvant_affine){ made->view.transform.center, NULL },
                               t->rows + 128 * WIDTH + (size_t)h * HEAD_DIM, WIDTH, 0, 64, page),
            KVANT_OK);
        assert_memory_equal(page, block.page, made->info.page_bytes);
        kvant_codec_free(&made);
        assert_int_equal(kvant_tensor_make_codec(f.tensor, 2, h, like, &made), KVANT_OK);
        float y[HEAD_DIM], z[HEAD_DIM];
        kvant_transform_forward(&made->transform, kvant_kernels_get(KVANT_CPU_AUTO), NULL, t->rows,
                                y);
        kvant_transform_dual(&made->transform, kvant_kernels_get(KVANT_CPU_AUTO), 1, t->queries, z);
        double exact = 0, ours = 0, length = 0;
        for (uint32_t j = 0; j < HEAD_DIM; j++) {
            exact += (double)t->rows[j] * t->queries[j];
            ours += (double)y[j] * z[j];
            length += fabs((double)y[j] * z[j]);
        }
        assert_true(fabs(ours - exact) < 1e-4 * length); /* roundings of binary32 */
        kvant_codec_free(&made);
    }
    assert_int_equal(kvant_tensor_make_codec(f.tensor, BLOCKS, 0, like, &made), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_make_codec(f.tensor, 0, N_KV_HEADS, like, &made),
                     KVANT_ERR_ARGUMENT);
    assert_null(made);
    kvant_codec_free(&like);
    drop(&f);
    free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matrices_make_errors_of_scores_small),
        cmocka_unit_test(values_get_matrices_without_queries),
        cmocka_unit_test(without_queries_there_are_factors),
        cmocka_unit_test(later_matrices_are_for_later_blocks),
        cmocka_unit_test(single_tokens_are_learnt_from),
        cmocka_unit_test(single_tokens_queries_count_before_and_behind_rows),
        cmocka_unit_test(hostile_first_rows_do_not_spoil),
        cmocka_unit_test(a_long_monotonous_prompt_leaves_a_place),
        cmocka_unit_test(outliers_do_not_spoil),
        cmocka_unit_test(threads_do_not_change_bytes),
        cmocka_unit_test(refused_rows_leave_no_trace),
        cmocka_unit_test(moved_blocks_keep_their_matrices),
        cmocka_unit_test(large_heads_have_parts),
        cmocka_unit_test(parts_have_every_channel_once),
        cmocka_unit_test(a_transform_is_a_codec),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
