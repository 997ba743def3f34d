/* test_learning.c - transform=first: matrices from keys and queries, several transforms, and
 * hostile first rows. test_learning_blocks.c tests what blocks keep of a transform. */
#include "learning_fixture.h"

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

CASE(matrices_make_errors_of_scores_small)
{
    const kind k = make_kind(1);
    text *t = make_text(&k, 2);
    fixture f = make(spec, 1, BLOCKS, 0), g = make(plain, 1, BLOCKS, 0);
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
CASE(values_get_matrices_without_queries)
{
    const kind k = make_kind(31);
    text *t = make_text(&k, 32);
    fixture f = make_values(spec), g = make_values("turboquant-4:norm=first"),
            h = make_values("turboquant-4:transform=first,center=first");
    fixture *all[] = { &f, &g, &h };
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
CASE(without_queries_there_are_factors)
{
    const kind k = make_kind(3);
    text *t = make_text(&k, 4);
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
CASE(later_matrices_are_for_later_blocks)
{
    const kind k = make_kind(5), other = make_kind(6);
    text *t = make_text(&k, 7), *u = make_text(&other, 8);
    fixture f = make(spec, 1, BLOCKS, 0);
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
CASE(single_tokens_are_learnt_from)
{
    const kind k = make_kind(9);
    text *t = make_text(&k, 10);
    fixture f = make(spec, 1, BLOCKS, 0), g = make(plain, 1, BLOCKS, 0);
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
CASE(single_tokens_queries_count_before_and_behind_rows)
{
    enum { N_ENOUGH = 200, N_MORE = 160 };
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
CASE(hostile_first_rows_do_not_spoil)
{
    static const struct {
        uint32_t n, batch;
        float spread;
    } starts[] = { { 200, 200, 0 }, { 200, 200, 1e-3f }, { 70, 1, 0 }, { 512, 512, 0.05f } };
    const kind k = make_kind(11);
    text *t = make_text(&k, 12), *hostile = make_text(&k, 13);
    fixture alone = make(spec, 1, BLOCKS, 0);
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
CASE(a_long_monotonous_prompt_leaves_a_place)
{
    const kind k = make_kind(23), other = make_kind(24);
    text *t = make_text(&k, 25), *hostile = make_text(&other, 26);
    fixture f = make(spec, 1, BLOCKS, 0), alone = make(spec, 1, BLOCKS, 0);
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
CASE(outliers_do_not_spoil)
{
    const kind k = make_kind(15);
    text *t = make_text(&k, 16), *u = make_text(&k, 16);
    fixture f = make(spec, 1, BLOCKS, 0), g = make(spec, 1, BLOCKS, 0);
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

CASE(threads_do_not_change_bytes)
{
    const kind k = make_kind(17);
    text *t = make_text(&k, 18);
    fixture f = make(spec, 1, BLOCKS, 0), g = make(spec, 1, BLOCKS, 0);
    put(&f, t, 0, 1200, 300, 1);
    put(&g, t, 0, 1200, 300, 4);
    assert_alike(&f, &g);
    drop(&f);
    drop(&g);
    free(t);
}

/* Rows that are refused change no byte that follows. */
CASE(refused_rows_leave_no_trace)
{
    const kind k = make_kind(19);
    text *t = make_text(&k, 20);
    float *bad = malloc(100 * WIDTH * sizeof *bad);
    fixture f = make(spec, 1, BLOCKS, 0), g = make(spec, 1, BLOCKS, 0);
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

RUN_CASES(NULL, NULL)
