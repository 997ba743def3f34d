/* test_rope.c - the frequencies that the plug-in reads from ROPE nodes, against the angles by which
 * ggml's CPU back end rotates rows. Nodes are built and stored as llama.cpp does it: plain, with
 * factors, scaled and with YaRN. */
#include "../cases.h"
#include "ggml-backend.h"
#include "ggml.h"

#include "buffer.h"
#include "ggml_api.h"
#include "log.h"
#include "rope.h"

static void *tensor_memory;

enum { DIM = 64, HEADS = 3, TOKENS = 5, MOST_POSITION = 4000 };

/* Functions of the plug-in that rope.c calls. */
kvp_ggml kvp_api;

uint32_t kvp_kv_n_positions(const kvp_kv *kv)
{
    return MOST_POSITION + 1;
}

void kvp_note(const char *format, ...)
{
}

static int start(void **state)
{
    ggml_backend_load_all_from_path(KVANT_TEST_LLAMA_LIB);
    kvp_api.op.none = GGML_OP_NONE;
    kvp_api.op.view = GGML_OP_VIEW;
    kvp_api.op.permute = GGML_OP_PERMUTE;
    kvp_api.op.reshape = GGML_OP_RESHAPE;
    kvp_api.op.transpose = GGML_OP_TRANSPOSE;
    kvp_api.op.rope = GGML_OP_ROPE;
    kvp_api.buft_is_host = (bool (*)(abi_buft *))(void (*)(void))ggml_backend_buft_is_host;
    return 0;
}

typedef struct variant {
    int n_dims, mode, n_ctx_orig;
    float base, scale, ext_factor, beta_fast, beta_slow;
    bool factors;
} variant;

typedef struct graph {
    struct ggml_context *context;
    struct ggml_tensor *in, *positions, *factors, *rope, *rows, *stored;
    ggml_backend_t cpu;
    ggml_backend_buffer_t memory;
} graph;

static const int32_t positions[TOKENS] = { 0, 1, 2, 17, MOST_POSITION };

/* Builds rows as llama.cpp gives them to SET_ROWS: a view of whole tokens. */
static graph build(const variant *v)
{
    const struct ggml_init_params params = {
        .mem_size = 64 * ggml_tensor_overhead() + ggml_graph_overhead(), .no_alloc = true
    };
    graph g = { .context = ggml_init(params),
                .cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, NULL) };
    struct ggml_tensor *cache = ggml_new_tensor_2d(g.context, GGML_TYPE_F16, DIM * HEADS, 64);
    struct ggml_tensor *cells = ggml_new_tensor_1d(g.context, GGML_TYPE_I64, TOKENS);

    g.in = ggml_new_tensor_3d(g.context, GGML_TYPE_F32, DIM, HEADS, TOKENS);
    g.positions = ggml_new_tensor_1d(g.context, GGML_TYPE_I32, TOKENS);
    g.factors = v->factors ? ggml_new_tensor_1d(g.context, GGML_TYPE_F32, v->n_dims / 2) : NULL;
    g.rope =
        ggml_rope_ext(g.context, g.in, g.positions, g.factors, v->n_dims, v->mode, v->n_ctx_orig,
                      v->base, v->scale, v->ext_factor, 1, v->beta_fast, v->beta_slow);
    g.rows = ggml_view_2d(g.context, g.rope, DIM * HEADS, TOKENS, g.rope->nb[2], 0);
    g.stored = ggml_set_rows(g.context, cache, g.rows, cells);
    g.memory = ggml_backend_alloc_ctx_tensors(g.context, g.cpu);
    ggml_backend_tensor_set(g.positions, positions, 0, sizeof(positions));
    for (int64_t i = 0; i < v->n_dims / 2 && v->factors; i++) {
        const float factor = 1 + (float)i * (float)i / 100;
        ggml_backend_tensor_set(g.factors, &factor, (size_t)i * sizeof(factor), sizeof(factor));
    }
    return g;
}

static void release(graph *g)
{
    ggml_backend_buffer_free(g->memory);
    ggml_backend_free(g->cpu);
    ggml_free(g->context);
}

/* Rotates rows in which every pair of channels is (1, 0). */
static const float *turn(graph *g, bool halves, int n_dims)
{
    struct ggml_cgraph *nodes = ggml_new_graph(g->context);
    float *in = g->in->data;

    for (int i = 0; i < DIM * HEADS * TOKENS; i++) {
        const int channel = i % DIM;
        in[i] =
            channel < n_dims && (halves ? channel < n_dims / 2 : channel % 2 == 0) ? 1.0f : 0.0f;
    }
    ggml_build_forward_expand(nodes, g->rope);
    assert_int_equal(ggml_backend_graph_compute(g->cpu, nodes), GGML_STATUS_SUCCESS);
    return g->rope->data;
}

/* ggml multiplies binary32 numbers. An angle of position p errs by p 2^-24 for each of up to 32
 * factors, and once more for its own rounding, and so does kvant's. YaRN scales lengths, so the
 * test compares directions. */
static void check(const variant *v)
{
    const bool halves = v->mode == GGML_ROPE_TYPE_NEOX;
    graph g = build(v);
    const abi_tensor *node = kvp_rope_of((const abi_tensor *)g.stored->src[0], DIM);
    const float *turned = turn(&g, halves, v->n_dims);
    float frequencies[KVANT_MAX_HEAD_DIM / 2];

    assert_ptr_equal(node, g.rope);
    assert_int_equal(kvp_rope_frequencies(node, frequencies), v->n_dims / 2);
    for (int token = 0; token < TOKENS; token++)
        for (int i = 0; i < v->n_dims / 2; i++) {
            const float *head = turned + (size_t)token * DIM * HEADS;
            const double x = head[halves ? i : 2 * i],
                         y = head[halves ? i + v->n_dims / 2 : 2 * i + 1], length = hypot(x, y);
            const double angle = (double)frequencies[i] * positions[token];
            const double bound = 1e-6 + 2 * (i + 2) * angle * 0x1p-24;
            assert_true(length > 0.5);
            assert_true(hypot(x / length - cos(angle), y / length - sin(angle)) < bound);
        }
    release(&g);
}

CASE(plain)
{
    const variant variants[] = {
        { .n_dims = DIM, .mode = GGML_ROPE_TYPE_NORMAL, .base = 10000, .scale = 1 },
        { .n_dims = DIM, .mode = GGML_ROPE_TYPE_NEOX, .base = 1000000, .scale = 1 },
        { .n_dims = DIM / 4, .mode = GGML_ROPE_TYPE_NEOX, .base = 10000, .scale = 1 },
        { .n_dims = DIM, .mode = GGML_ROPE_TYPE_NEOX, .base = 1000000, .scale = 0.125f },
    };

    for (size_t i = 0; i < sizeof(variants) / sizeof(variants[0]); i++)
        check(&variants[i]);
}

CASE(with_factors)
{
    check(&(variant){ .n_dims = DIM,
                      .mode = GGML_ROPE_TYPE_NORMAL,
                      .base = 500000,
                      .scale = 1,
                      .factors = true });
    check(&(variant){ .n_dims = DIM / 2,
                      .mode = GGML_ROPE_TYPE_NEOX,
                      .base = 10000,
                      .scale = 0.5f,
                      .factors = true });
}

CASE(yarn)
{
    const variant v = { .n_dims = DIM,
                        .mode = GGML_ROPE_TYPE_NEOX,
                        .n_ctx_orig = 4096,
                        .base = 10000,
                        .scale = 0.0625f,
                        .ext_factor = 1,
                        .beta_fast = 32,
                        .beta_slow = 1 };
    variant other = v;
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    graph g = build(&v);

    check(&v);
    other.ext_factor = 0.7f;
    other.factors = true;
    check(&other);
    assert_int_equal(kvp_rope_frequencies((const abi_tensor *)g.rope, frequencies), DIM / 2);
    assert_true(frequencies[0] == 1);                                             /* not scaled */
    assert_true(fabs(frequencies[31] - 0.0625 * pow(10000, -31.0 / 32)) < 1e-10); /* scaled */
    release(&g);
}

/* A context shift's node: n_rot channels of each head of a cache, beginning at the offset. */
static bool is_noted(const variant *v, float attn_factor, int offset)
{
    graph g = build(v);
    struct ggml_tensor *cache = ggml_new_tensor_2d(g.context, GGML_TYPE_F16, DIM * HEADS, TOKENS);
    struct ggml_tensor *view =
        ggml_view_3d(g.context, cache, v->n_dims, HEADS, TOKENS, DIM * sizeof(uint16_t),
                     cache->nb[1], (size_t)offset * sizeof(uint16_t));
    struct ggml_tensor *node = ggml_rope_ext_inplace(
        g.context, view, g.positions, g.factors, v->n_dims, v->mode, v->n_ctx_orig, v->base,
        v->scale, v->ext_factor, attn_factor, v->beta_fast, v->beta_slow);
    kvp_kv kv = { .shape.role = KVANT_ROLE_K, .head_dim = DIM };
    float frequencies[KVANT_MAX_HEAD_DIM / 2], want[KVANT_MAX_HEAD_DIM / 2];
    kvant_rope rope;
    bool noted = kvp_rope_of_shift(&kv, (const abi_tensor *)node, &rope, frequencies);

    if (noted) {
        assert_int_equal(rope.n_dims, v->n_dims);
        assert_int_equal(rope.interleaved, v->mode == GGML_ROPE_TYPE_NORMAL);
        assert_int_equal(kvp_rope_frequencies((const abi_tensor *)g.rope, want), v->n_dims / 2);
        assert_memory_equal(frequencies, want, (size_t)v->n_dims / 2 * sizeof(float));
    }
    release(&g);
    return noted;
}

/* Only shifts that rotate the first channels and change no length are noted. Other shifts encode
 * keys again. */
CASE(shifts_are_noted)
{
    const variant v = { .n_dims = DIM, .mode = GGML_ROPE_TYPE_NEOX, .base = 10000, .scale = 1 };
    const variant some = { .n_dims = DIM / 4,
                           .mode = GGML_ROPE_TYPE_NORMAL,
                           .base = 10000,
                           .scale = 0.5f,
                           .factors = true };
    const variant yarn = { .n_dims = DIM,
                           .mode = GGML_ROPE_TYPE_NEOX,
                           .n_ctx_orig = 4096,
                           .base = 10000,
                           .scale = 0.0625f,
                           .ext_factor = 1,
                           .beta_fast = 32,
                           .beta_slow = 1 };

    assert_true(is_noted(&v, 1, 0));
    assert_true(is_noted(&some, 1, 0));
    assert_true(is_noted(&yarn, 1 / (1 + 0.1f * logf(16)), 0));
    assert_false(is_noted(&yarn, 1, 0));
    assert_false(is_noted(&v, 1.2f, 0));
    assert_false(is_noted(&some, 1, DIM - DIM / 4));
}

static kvant_tensor *new_tensor(const char *spec, kvant_codec **codec)
{
    const kvant_codec *codecs[HEADS];
    kvant_tensor_params params = { .size = sizeof(params),
                                   .codecs = codecs,
                                   .n_kv_heads = HEADS,
                                   .n_sequences = 1,
                                   .n_blocks = 2 };
    kvant_tensor *tensor = NULL;
    size_t bytes;
    void *memory;

    assert_int_equal(kvant_codec_create(spec, DIM, KVANT_ROLE_K, 0, codec, NULL, 0), KVANT_OK);
    for (int head = 0; head < HEADS; head++)
        codecs[head] = *codec;
    assert_int_equal(kvant_tensor_size(&params, &bytes), KVANT_OK);
    memory = aligned_alloc(KVANT_PAGE_ALIGN,
                           (bytes + KVANT_PAGE_ALIGN - 1) / KVANT_PAGE_ALIGN * KVANT_PAGE_ALIGN);
    memset(memory, 0, bytes);
    assert_int_equal(kvant_tensor_create(&params, memory, &tensor), KVANT_OK);
    tensor_memory = memory;
    return tensor;
}

static void delete_tensor(kvant_tensor *tensor, kvant_codec *codec)
{
    kvant_tensor_free(&tensor);
    kvant_codec_free(&codec);
    free(tensor_memory);
}

CASE(positions_of_the_batch)
{
    const variant v = { .n_dims = DIM, .mode = GGML_ROPE_TYPE_NORMAL, .base = 10000, .scale = 1 };
    kvant_codec *codec = NULL;
    kvant_tensor *tensor = new_tensor("int-8:transform=first", &codec);
    kvp_kv kv = { .shape.role = KVANT_ROLE_K, .head_dim = DIM, .tensor = tensor };
    const int32_t beyond = MOST_POSITION + 1;
    const kvp_compute compute = { .n_threads = 1 };
    graph g = build(&v);

    assert_memory_equal(kvp_rope_positions(&compute, &kv, (const abi_tensor *)g.rows), positions,
                        sizeof(positions));
    ggml_backend_tensor_set(g.positions, &beyond, 4, sizeof(beyond));
    assert_null(kvp_rope_positions(&compute, &kv, (const abi_tensor *)g.rows));
    assert_true(kv.roped);
    release(&g);
    delete_tensor(tensor, codec);
    codec = NULL;
    kv = (kvp_kv){ .shape.role = KVANT_ROLE_K,
                   .head_dim = DIM,
                   .tensor = tensor = new_tensor("int-8", &codec) };
    g = build(&v);
    /* the positions would be of no use */
    assert_null(kvp_rope_positions(&compute, &kv, (const abi_tensor *)g.rows));
    release(&g);
    delete_tensor(tensor, codec);
}

CASE(other_rows_have_none)
{
    const variant v = { .n_dims = DIM, .mode = GGML_ROPE_TYPE_NORMAL, .base = 10000, .scale = 1 };
    int sections[4] = { 8, 12, 12, 0 };
    graph g = build(&v);
    struct ggml_tensor *four = ggml_new_tensor_1d(g.context, GGML_TYPE_I32, 4 * TOKENS);
    struct ggml_tensor *rows[] = {
        ggml_view_2d(g.context, g.in, DIM * HEADS, TOKENS, g.in->nb[2], 0),
        ggml_view_2d(g.context, ggml_scale(g.context, g.rope, 2), DIM * HEADS, TOKENS,
                     g.rope->nb[2], 0),
        ggml_view_2d(g.context, g.rope, DIM * (HEADS - 1), TOKENS, g.rope->nb[2], 0),
        ggml_view_2d(g.context, g.rope, DIM * HEADS, TOKENS - 1, g.rope->nb[2], g.rope->nb[2]),
        ggml_view_2d(g.context,
                     ggml_rope_multi(g.context, g.in, four, NULL, DIM, sections,
                                     GGML_ROPE_TYPE_MROPE, 0, 10000, 1, 0, 1, 32, 1),
                     DIM * HEADS, TOKENS, g.rope->nb[2], 0),
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        assert_null(kvp_rope_of((const abi_tensor *)rows[i], DIM));
    assert_null(kvp_rope_of((const abi_tensor *)g.rows, DIM / 2));
    assert_ptr_equal(kvp_rope_of((const abi_tensor *)g.rows, DIM), g.rope);
    release(&g);
}

RUN_CASES(start, NULL)
