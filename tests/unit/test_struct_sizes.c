/* test_struct_sizes.c - size fields of structs that cross the library's border: a caller
 * compiled against the first released header or against a newer one is served, one that asks for
 * what this version does not know is refused. */
#include <kvant/index.h>

#include "attend.h"

#define TAIL 24 /* bytes of a newer header's members */

/* An object of exactly these bytes, so that a sanitiser sees one read or written too many; the
 * size field says how many. */
static void *sized(const void *object, size_t known, size_t size, uint8_t tail)
{
    uint8_t *bytes = malloc(size);
    memset(bytes, 0, size);
    memcpy(bytes, object, size < known ? size : known);
    if (size > known)
        bytes[known + (size - known) / 2] = tail;
    memcpy(bytes, &size, sizeof size);
    return bytes;
}

#define END_OF(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))

static fixture use(kvant_role role)
{
    uint64_t rng = 7;
    fixture f = make_heads("turboquant-4", "turboquant-4", role, 1, 3, 0);
    write_range(&f, 0, 150, 150, 1, &rng);
    return f;
}

static kvant_status try_params(const fixture *f, size_t size, uint8_t tail)
{
    kvant_tensor_params params = params_of(f);
    kvant_tensor_params *given = sized(&params, sizeof params, size, tail);
    kvant_tensor *tensor = NULL;
    size_t bytes = 0;
    kvant_status status = kvant_tensor_size(given, &bytes);
    void *memory = aligned(f->bytes);
    assert_int_equal(kvant_tensor_create(given, memory, &tensor), status);
    assert_int_equal(tensor != NULL, status == KVANT_OK);
    if (status == KVANT_OK)
        assert_int_equal(bytes, f->bytes);
    kvant_tensor_free(&tensor);
    free(memory);
    free(given);
    return status;
}

static void tensor_params(void **state)
{
    (void)state;
    fixture f = use(KVANT_ROLE_K);
    const size_t first = END_OF(kvant_tensor_params, n_open_blocks), now = sizeof(kvant_tensor_params);
    assert_int_equal(try_params(&f, first, 0), KVANT_OK);
    assert_int_equal(try_params(&f, now, 0), KVANT_OK);
    assert_int_equal(try_params(&f, now + TAIL, 0), KVANT_OK);
    assert_int_equal(try_params(&f, now + TAIL, 1), KVANT_ERR_ARGUMENT);
    for (size_t size = sizeof(size_t); size < first; size++)
        assert_int_equal(try_params(&f, size, 0), KVANT_ERR_ARGUMENT);
    drop(&f);
}

typedef struct attention {
    fixture k, v;
    float q[2 * N_HEADS * HEAD_DIM];
    attended want, got;
} attention;

static kvant_status try_problem(attention *a, size_t size, uint8_t tail)
{
    kvant_attention_problem problem = { .n_queries = 2, .n_tokens = 150, .causal = true, .scale = 0.1f };
    size_t bytes = 0, other = 0;
    assert_int_equal(attend(&a->k, &a->v, &problem, a->q, &a->want), KVANT_OK);
    problem.out = a->got.out;
    problem.lse = a->got.lse;
    a->got = (attended){ .out = { 1 } };
    assert_int_equal(kvant_attention_workspace(a->k.tensor, a->v.tensor, &problem, &bytes), KVANT_OK);
    void *workspace = aligned(bytes);
    kvant_attention_problem *given = sized(&problem, sizeof problem, size, tail);
    kvant_status status = kvant_attention(a->k.tensor, a->v.tensor, given, workspace, bytes);
    assert_int_equal(kvant_attention_workspace(a->k.tensor, a->v.tensor, given, &other), status);
    if (status == KVANT_OK) {
        assert_int_equal(bytes, other);
        assert_memory_equal(a->got.out, a->want.out, sizeof a->q);
        assert_memory_equal(a->got.lse, a->want.lse, 2 * N_HEADS * sizeof *a->got.lse);
    } else
        assert_true(a->got.out[0] == 1 && a->got.out[1] == 0); /* nothing was written */
    free(given);
    free(workspace);
    return status;
}

static void attention_problem(void **state)
{
    (void)state;
    static attention a;
    uint64_t rng = 6;
    a.k = use(KVANT_ROLE_K);
    a.v = use(KVANT_ROLE_V);
    fill_normal(a.q, COUNT(a.q), &rng);
    const size_t first = END_OF(kvant_attention_problem, exact), now = sizeof(kvant_attention_problem);
    assert_int_equal(try_problem(&a, first, 0), KVANT_OK);
    assert_int_equal(try_problem(&a, now, 0), KVANT_OK);
    assert_int_equal(try_problem(&a, now + TAIL, 0), KVANT_OK);
    assert_int_equal(try_problem(&a, now + TAIL, 1), KVANT_ERR_ARGUMENT);
    for (size_t size = sizeof(size_t); size < first; size++)
        assert_int_equal(try_problem(&a, size, 0), KVANT_ERR_ARGUMENT);
    drop(&a.k);
    drop(&a.v);
}

/* Structs that the library fills: cut to the caller's size, whose further bytes keep what they
 * hold. */
static void filled_structs(void **state)
{
    (void)state;
    fixture f = use(KVANT_ROLE_K);
    kvant_tensor_info info = tensor_info_of(&f);
    kvant_block_info block = block_of(&f, 1, 1);
    for (int newer = 0; newer < 2; newer++) {
        size_t size = newer ? sizeof info + TAIL : END_OF(kvant_tensor_info, written_blocks);
        kvant_tensor_info *given = sized(&(kvant_tensor_info){ 0 }, sizeof info, size, 0xaa);
        assert_int_equal(kvant_tensor_get_info(f.tensor, given), KVANT_OK);
        assert_memory_equal((char *)given + sizeof(size_t), (char *)&info + sizeof(size_t),
                            (newer ? sizeof info : size) - sizeof(size_t));
        assert_int_equal(given->size, size);
        assert_true(!newer || ((uint8_t *)given)[sizeof info + TAIL / 2] == 0xaa);
        free(given);
        size = newer ? sizeof block + TAIL : END_OF(kvant_block_info, affine);
        kvant_block_info *page = sized(&(kvant_block_info){ 0 }, sizeof block, size, 0xaa);
        assert_int_equal(kvant_tensor_get_block(f.tensor, 1, 1, page), KVANT_OK);
        assert_int_equal(page->state, block.state);
        assert_ptr_equal(page->page, block.page);
        assert_true(page->written == block.written);
        assert_int_equal(page->size, size);
        assert_true(!newer || ((uint8_t *)page)[sizeof block + TAIL / 2] == 0xaa);
        free(page);
    }
    for (size_t size = sizeof(size_t); size < END_OF(kvant_tensor_info, written_blocks); size++) {
        kvant_tensor_info *given = sized(&(kvant_tensor_info){ 0 }, sizeof info, size, 0);
        assert_int_equal(kvant_tensor_get_info(f.tensor, given), KVANT_ERR_ARGUMENT);
        free(given);
    }
    for (size_t size = sizeof(size_t); size < END_OF(kvant_block_info, affine); size++) {
        kvant_block_info *given = sized(&(kvant_block_info){ 0 }, sizeof block, size, 0);
        assert_int_equal(kvant_tensor_get_block(f.tensor, 0, 0, given), KVANT_ERR_ARGUMENT);
        free(given);
    }
    assert_int_equal(kvant_tensor_get_info(f.tensor, NULL), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_get_block(f.tensor, 0, 0, NULL), KVANT_ERR_ARGUMENT);
    drop(&f);
}

static kvant_status try_index(size_t size, uint8_t tail)
{
    const kvant_index_params params = { .size = sizeof params, .dim = 4, .spec = "turboquant-4" };
    kvant_index_params *given = sized(&params, sizeof params, size, tail);
    kvant_index *index;
    const kvant_status status = kvant_index_create(given, &index, NULL, 0);
    assert_int_equal(index != NULL, status == KVANT_OK);
    kvant_index_free(&index);
    free(given);
    return status;
}

static void index_structs(void **state)
{
    const kvant_index_params params = { .size = sizeof params, .dim = 4 };
    const float row[4] = { 1 };
    const kvant_index_query query = { .size = sizeof query, .rows = row, .stride = 4, .n = 1, .k = 1 };
    const size_t first = END_OF(kvant_index_params, center), now = sizeof params;
    kvant_index *index;
    float score;
    uint64_t id;
    (void)state;
    assert_int_equal(try_index(now, 0), KVANT_OK);
    assert_int_equal(try_index(now + TAIL, 0), KVANT_OK);
    assert_int_equal(try_index(now + TAIL, 1), KVANT_ERR_ARGUMENT);
    for (size_t size = sizeof(size_t); size < first; size++)
        assert_int_equal(try_index(size, 0), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_index_create(&params, &index, NULL, 0), KVANT_OK);
    for (size_t size = sizeof(size_t); size <= sizeof query; size++) {
        kvant_index_query *given = sized(&query, sizeof query, size, 0);
        const bool served = size >= END_OF(kvant_index_query, n_probe);
        assert_int_equal(kvant_index_search(index, given, &score, &id), served ? KVANT_OK : KVANT_ERR_ARGUMENT);
        free(given);
    }
    for (size_t size = sizeof(size_t); size <= sizeof(kvant_index_info); size++) {
        kvant_index_info *given = sized(&(kvant_index_info){ 0 }, sizeof(kvant_index_info), size, 0);
        const bool served = size >= END_OF(kvant_index_info, n_lists);
        assert_int_equal(kvant_index_get_info(index, given), served ? KVANT_OK : KVANT_ERR_ARGUMENT);
        free(given);
    }
    kvant_index_free(&index);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensor_params),
        cmocka_unit_test(attention_problem),
        cmocka_unit_test(filled_structs),
        cmocka_unit_test(index_structs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
