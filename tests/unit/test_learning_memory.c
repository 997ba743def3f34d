/* test_learning_memory.c - the working memory of learning: it is counted while it exists, freed
 * when learning ends, and allocated again for rows of another kind. */
#include "rotated_text.h"

static kvant_tensor_info told(const fixture *f)
{
    kvant_tensor_info info = { .size = sizeof info };
    assert_int_equal(kvant_tensor_get_info(f->tensor, &info), KVANT_OK);
    return info;
}

/* The sample of queries by which a tensor chooses between transforms. It stays allocated. */
enum { SAMPLED = SAMPLE_QUERIES * WIDTH * sizeof(float) };

static size_t sums_bytes(const kvant_learning *l)
{
    return (l->n_sub_heads * (l->part + 2 * kvant_lower_floats(l->part)) + WIDTH) * sizeof(float);
}

CASE(it_is_counted_until_it_is_given_back)
{
    for (uint32_t i = 0; i < 4; i++) {
        const layout *l = &layouts()[i];
        text *t = make_text(l, i + 1), *other = make_text(l, i + 100);
        fixture f = make_rotated(l, 4096, 0);
        const kvant_learning *learning = f.tensor->learning;
        assert_int_equal(told(&f).working_bytes, SAMPLED);
        put_all(&f, t, 0, 128, 128, 0);
        assert_int_equal(told(&f).working_bytes, SAMPLED + sums_bytes(learning));
        put_all(&f, t, 128, 129, 1, 0); /* this row is pending until more rows come */
        assert_in_range(told(&f).working_bytes, SAMPLED + sums_bytes(learning) + 1,
                        told(&f).working_most);
        put_all(&f, t, 129, 192, 1, 0);
        assert_in_range(told(&f).working_bytes, SAMPLED + sums_bytes(learning),
                        told(&f).working_most);
        put_all(&f, t, 192, 4096, BATCH, 0); /* positions of all position buckets */
        assert_true(learning->schedule.done);
        assert_null(learning->sums);
        assert_null(learning->rows);
        assert_null(f.tensor->recent.sum);
        assert_int_equal(told(&f).working_bytes, SAMPLED);
        const uint32_t n_transforms = told(&f).n_transforms;
        put_all(&f, other, 0, BATCH, BATCH, 4096);
        assert_true(told(&f).n_transforms > n_transforms); /* rows of another kind */
        assert_non_null(learning->sums);
        kvant_tensor_clear(f.tensor);
        assert_int_equal(told(&f).working_bytes, SAMPLED);
        drop(&f);
        free(t);
        free(other);
    }
}

/* The tensor counts only blocks that hold rows: after rows were written, cleared and moved. */
CASE(blocks_with_rows_are_counted)
{
    fixture f = make("turboquant-4:center=first", 1, 8, 0);
    uint64_t rng = 1;
    assert_int_equal(told(&f).written_blocks, 0);
    write_range(&f, 0, 70, 70, 1, &rng);
    assert_int_equal(told(&f).written_blocks, 2);
    write_range(&f, 0, 70, 7, 1, &rng);
    assert_int_equal(told(&f).written_blocks, 2);
    assert_int_equal(kvant_tensor_copy(f.tensor, 0, f.tensor, 4, 2), KVANT_OK);
    assert_int_equal(told(&f).written_blocks, 4);
    assert_int_equal(kvant_tensor_clear_blocks(f.tensor, 1, 1), KVANT_OK);
    assert_int_equal(told(&f).written_blocks, 3);
    kvant_tensor_clear(f.tensor);
    assert_int_equal(told(&f).written_blocks, 0);
    drop(&f);
}

RUN_CASES(NULL, NULL)
