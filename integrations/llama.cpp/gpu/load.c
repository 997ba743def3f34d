/* load.c - loads kernels of compressed pages before a token needs them.
 *
 * CUDA loads a kernel when it is launched first. The first token over compressed pages would wait
 * 12 ms for all of theirs (H200). So a thread captures such launches into a graph when a cache is
 * created, and never launches the graph. Making the executable graph loads its kernels. Nothing
 * reads or writes the memory that the launches name, so any memory of the GPU will do.
 *
 * The first graph of a process that is launched takes longer than later graphs, because the driver
 * makes room for its nodes. So the thread also launches a graph of kernels that do nothing, with
 * about as many nodes as a token has. */
#include "learner.h"

#include <stdlib.h>
#include <string.h>

#include <kvant/tensor_hooks.h>

#include "../host.h"

#define MANY 512u      /* tokens of a prompt's batch */
#define HELD_ROWS 768u /* rows that a layer stores at once when its keys change their transform */
#define NODES 1024     /* of a graph that does nothing; a token of 32 layers has 650 to 850 */

/* The codecs and the memory of a layer's launches. */
typedef struct layer {
    const kvp_gpu_cells *k, *v;
    kvant_cuda_codec *sealed, *open, *v_open;     /* of keys with a matrix, if they ever have one */
    void *any;                                    /* memory, aligned to 256 bytes */
    const float *k_scale, *k_weights, *v_weights; /* NULL: none */
    bool has_block_centers;                       /* blocks of keys have centres */
    uint32_t n_heads;
    cu_stream stream;
} layer;

static kvant_cuda_pages open_pages_of(const layer *l)
{
    const size_t page = kvp_gpu_open_page_bytes(l->k);

    return (kvant_cuda_pages){ l->any, l->k->n_kv_heads * page, page };
}

static kvant_cuda_rows keys_of(const layer *l, bool open)
{
    return (kvant_cuda_rows){ .codec = open ? l->open : l->sealed,
                              .pages = open ? open_pages_of(l) : l->k->pages,
                              .rows = l->any,
                              .token_stride = kvp_gpu_width(l->k),
                              .head_stride = l->k->head_dim,
                              .scale = l->k_scale,
                              .key_transform = l->k_weights };
}

static kvant_cuda_rows values_of(const layer *l, bool open)
{
    return (kvant_cuda_rows){ .codec = open ? l->v_open : l->v->codec,
                              .pages = open ? open_pages_of(l) : l->v->pages,
                              .rows = l->any,
                              .token_stride = kvp_gpu_width(l->v),
                              .head_stride = l->v->head_dim,
                              .key_transform = l->v_weights };
}

static kvant_cuda_block_centers block_centers_of(const layer *l)
{
    return (kvant_cuda_block_centers){
        .pairs = l->any, .start = l->any, .phases = l->any, .transform_ids = l->any
    };
}

static kvant_cuda_kernel_append_args append_args(const layer *l, kvant_cuda_type type, uint32_t n)
{
    return (kvant_cuda_kernel_append_args){ .size = sizeof(kvant_cuda_kernel_append_args),
                                            .type = type,
                                            .n_tokens = n,
                                            .n_kv_heads = l->k->n_kv_heads,
                                            .slots = l->any,
                                            .slots_ready = 1,
                                            .marks = l->any,
                                            .mark_ids = l->any };
}

static kvant_cuda_kernel_query_args query_args(const layer *l, uint32_t n)
{
    return (kvant_cuda_kernel_query_args){ .size = sizeof(kvant_cuda_kernel_query_args),
                                           .k_codec = l->sealed,
                                           .batch = n,
                                           .n_heads = l->n_heads,
                                           .n_kv_heads = l->k->n_kv_heads,
                                           .type = KVANT_CUDA_F32,
                                           .q = l->any,
                                           .q_batch_stride = (size_t)l->n_heads * l->k->head_dim,
                                           .q_head_stride = l->k->head_dim,
                                           .inverse_key_transform = l->any,
                                           .out = l->any,
                                           .compact = l->has_block_centers };
}

/* Learned matrices are compact. */
static void use_compact(const layer *l, kvant_cuda_kernel_append_args *args)
{
    args->k_compact = l->has_block_centers ? l->any : NULL;
    args->k_matrix = l->has_block_centers ? (float *)l->any : NULL;
}

/* Rows of a step: to exact pages alone, or encoded at once. */
static void append_step(const layer *l, uint32_t n, bool open)
{
    kvant_cuda_kernel_append_args args = append_args(l, KVANT_CUDA_F32, n);

    args.k = keys_of(l, open);
    args.v = values_of(l, open);
    use_compact(l, &args);
    if (l->has_block_centers) {
        args.k_block_centers = block_centers_of(l);
        args.center_slots = l->any;
        args.centered = l->any;
    }
    if (n <= KVP_SHORT_STEP_TOKENS && l->k_weights != NULL)
        args.queries = query_args(l, n);
    kvant_cuda_kernel_append(&args, l->stream);
}

/* Rows of a layer that goes to compressed pages, or whose keys change their transform. */
static void append_held(const layer *l, bool open)
{
    kvant_cuda_kernel_append_args keys = append_args(l, KVANT_CUDA_F32, HELD_ROWS),
                                  values = append_args(l, KVANT_CUDA_F16, HELD_ROWS);

    keys.k = keys_of(l, open);
    use_compact(l, &keys);
    values.v = values_of(l, open);
    kvant_cuda_kernel_append(&keys, l->stream);
    kvant_cuda_kernel_append(&values, l->stream);
}

/* Rows of exact pages that are sealed. */
static void append_sealed(const layer *l)
{
    kvant_cuda_kernel_append_args args = append_args(l, KVANT_CUDA_F16, HELD_ROWS);

    args.slots_ready = 0;
    args.marks = NULL;
    args.mark_ids = NULL;
    args.transformed = 1;
    args.k = keys_of(l, false);
    args.v = values_of(l, false);
    args.k.scale = args.k.key_transform = args.v.key_transform = NULL;
    kvant_cuda_kernel_append(&args, l->stream);
}

/* Blocks that are sealed as a whole. */
static void seal(const layer *l)
{
    kvant_cuda_seal_args keys = { .size = sizeof(keys),
                                  .n_blocks = 1,
                                  .n_kv_heads = l->k->n_kv_heads,
                                  .from = l->any,
                                  .to = l->any,
                                  .tokens = l->any },
                         values = keys;

    keys.k = (kvant_cuda_seal_pages){ l->sealed, open_pages_of(l), l->k->pages };
    values.v = (kvant_cuda_seal_pages){ l->v->codec, open_pages_of(l), l->v->pages };
    if (l->k->group > 1)
        kvant_cuda_seal(&keys, l->stream);
    if (l->v->group > 1)
        kvant_cuda_seal(&values, l->stream);
}

static void decode_pages(const layer *l, bool open, kvant_cuda_type type, bool transformed)
{
    const kvant_cuda_decode_args args = { .size = sizeof(args),
                                          .codec = open ? l->open : l->sealed,
                                          .pages = open ? open_pages_of(l) : l->k->pages,
                                          .blocks = l->any,
                                          .n_blocks = 1,
                                          .n_kv_heads = l->k->n_kv_heads,
                                          .type = type,
                                          .out = l->any,
                                          .token_stride = kvp_gpu_width(l->k),
                                          .head_stride = l->k->head_dim,
                                          .scale = transformed ? NULL : l->k_scale,
                                          .inverse_key_transform =
                                              transformed ? NULL : l->k_weights,
                                          .transformed = transformed };

    kvant_cuda_decode(&args, l->stream);
}

static void center(const layer *l, kvant_cuda_type type)
{
    const kvant_cuda_center_rows_args args = { .size = sizeof(args),
                                               .rows = l->any,
                                               .type = type,
                                               .token_stride = kvp_gpu_width(l->k),
                                               .head_stride = l->k->head_dim,
                                               .n_tokens = HELD_ROWS,
                                               .n_kv_heads = l->k->n_kv_heads,
                                               .head_dim = l->k->head_dim,
                                               .slots = l->any,
                                               .block_centers = block_centers_of(l),
                                               .out = l->any };

    kvant_cuda_center_rows(&args, l->stream);
}

/* further: keys have several matrices. */
static void attend(const layer *l, uint32_t n, bool further)
{
    const size_t d = l->k->head_dim, width = l->n_heads * d;
    kvant_cuda_kernel_attention_args args = { .size = sizeof(args),
                                              .k_codec = l->sealed,
                                              .v_codec = l->v->codec,
                                              .k = l->k->pages,
                                              .v = l->v->pages,
                                              .k_open = open_pages_of(l),
                                              .v_open = open_pages_of(l),
                                              .block_table = l->any,
                                              .table_stride = 64,
                                              .blocks_per_row = 64,
                                              .lengths = l->any,
                                              .batch = 1,
                                              .n_heads = l->n_heads,
                                              .n_kv_heads = l->k->n_kv_heads,
                                              .type = KVANT_CUDA_F32,
                                              .q = l->any,
                                              .q_batch_stride = n * width,
                                              .q_head_stride = d,
                                              .out = l->any,
                                              .out_batch_stride = n * width,
                                              .out_head_stride = d,
                                              .scale = 1,
                                              .k_scale = l->k_scale,
                                              .workspace = l->any,
                                              .workspace_bytes =
                                                  kvant_cuda_kernel_workspace((uint32_t)d, 2) +
                                                  (n > 1 ? KVANT_CUDA_SCRATCH_BYTES : 0),
                                              .query_tokens = n,
                                              .causal = n > 1,
                                              .q_token_stride = width,
                                              .out_token_stride = width,
                                              .table_ready = 1,
                                              .new_cells = n > 1 ? NULL : l->any,
                                              .n_matrices = further ? 2 : 1,
                                              .matrices = further ? l->any : NULL,
                                              .q_matrix_stride = n * width,
                                              .q_ids = { 0, 1 } };

    if (l->has_block_centers)
        args.plain_queries = (kvant_cuda_plain_queries){ .q = l->any,
                                                         .type = KVANT_CUDA_F32,
                                                         .q_batch_stride = n * width,
                                                         .q_token_stride = width,
                                                         .q_head_stride = d,
                                                         .block_centers = block_centers_of(l),
                                                         .offsets = l->any };
    kvant_cuda_kernel_attention(&args, l->stream);
}

/* marks: of cells, in GPU memory. If no cell has a mark, the kernel does nothing. */
static void fill_marked(const layer *l, void *marks)
{
    const size_t width = (size_t)l->n_heads * l->k->head_dim;
    const kvant_cuda_marked_args args = { .size = sizeof(args),
                                          .marks = marks,
                                          .lengths = l->any,
                                          .batch = 1,
                                          .query_tokens = 1,
                                          .n_heads = l->n_heads,
                                          .head_dim = l->k->head_dim,
                                          .type = KVANT_CUDA_F32,
                                          .out = l->any,
                                          .out_batch_stride = width,
                                          .out_token_stride = width,
                                          .out_head_stride = l->k->head_dim };

    kvant_cuda_fill_marked(&args, l->stream);
}

/* A launch that the library refuses is one that this layer never has. */
/* Learns from numbers that are never computed. */
static void learn(const layer *l)
{
    kvant_cuda_learn_args args = { .size = sizeof(args),
                                   .head_dim = l->k->head_dim,
                                   .n_kv_heads = l->k->n_kv_heads,
                                   .group = 1,
                                   .type = KVANT_CUDA_F16,
                                   .n_rows = 1,
                                   .n_tokens = 1,
                                   .batch_tokens = 1,
                                   .rows = l->any,
                                   .token_stride = kvp_gpu_width(l->k),
                                   .head_stride = l->k->head_dim,
                                   .queries = { l->any },
                                   .query_stride = kvp_gpu_width(l->k),
                                   .triangles = l->any,
                                   .centers = l->any,
                                   .start = l->any,
                                   .workspace = l->any };
    const kvant_cuda_compact_args compact = { .size = sizeof(compact),
                                              .head_dim = l->k->head_dim,
                                              .n_kv_heads = l->k->n_kv_heads,
                                              .triangles = l->any,
                                              .compact = (char *)l->any + 16 };
    const kvant_cuda_place_centers_args centers = {
        .size = sizeof(centers),
        .codec = l->k->codecs[0],
        .n_kv_heads = l->k->n_kv_heads,
        .one = { .center = l->any, .start = l->any, .compact = l->any, .key_center = l->any }
    };
    uint32_t knows_rope;

    if (kvant_cuda_learn_plan(NULL, &args, &knows_rope) == KVANT_OK) {
        args.workspace_bytes = kvant_cuda_learn_bytes(&args);
        kvant_cuda_learn(&args, l->stream);
        kvant_cuda_compact(&compact, l->stream);
        kvant_cuda_place_centers(&centers, l->stream);
    }
}

static void launch_all(const layer *l)
{
    const kvant_cuda_kernel_query_args queries = query_args(l, MANY);

    for (int open = 0; open < 2; open++) {
        append_step(l, MANY, open);
        append_held(l, open);
        decode_pages(l, open, KVANT_CUDA_F32, false);
    }
    append_step(l, 1, true);
    append_sealed(l);
    seal(l);
    decode_pages(l, false, KVANT_CUDA_F16, true);
    if (l->has_block_centers) {
        center(l, KVANT_CUDA_F16);
        center(l, KVANT_CUDA_F32);
    }
    if (l->k_weights != NULL)
        kvant_cuda_kernel_transform_queries(&queries, l->stream);
    for (int further = 0; further <= l->has_block_centers; further++) {
        attend(l, 1, further);
        attend(l, MANY, further);
    }
    if (l->has_block_centers)
        learn(l);
    fill_marked(l, l->any);
}

static void launch_none(const layer *l, void *no_marks)
{
    for (int i = 0; i < NODES; i++)
        fill_marked(l, no_marks);
}

/* Makes a graph of all kernels; or of kernels that do nothing, if there are no_marks, and launches
 * it. Without the graph kernels are loaded later, as without this file. */
static void capture(const layer *l, void *no_marks)
{
    cu_graph graph = NULL;
    cu_graph_exec exec = NULL;

    if (kvp_cu.capture_begin(l->stream, CU_CAPTURE_RELAXED) != 0)
        return;
    if (no_marks != NULL)
        launch_none(l, no_marks);
    else
        launch_all(l);
    if (kvp_cu.capture_end(l->stream, &graph) != 0 || graph == NULL)
        return;
    if (kvp_cu.graph_make(&exec, graph, 0) == 0) {
        if (no_marks != NULL && kvp_cu.graph_launch(exec, l->stream) == 0)
            kvp_cu.stream_finish(l->stream);
        kvp_cu.exec_free(exec);
    }
    kvp_cu.graph_free(graph);
}

static void launch_first_graph(const layer *l)
{
    cu_address none;

    if (kvp_cu.memory_new(&none, sizeof(uint32_t)) != 0)
        return;
    if (kvp_cu.fill(none, 0, sizeof(uint32_t), l->stream) == 0)
        capture(l, (void *)(uintptr_t)none);
    kvp_cu.memory_free(none);
}

/* The thread */

static void load(kvp_gpu_loader *loader)
{
    layer l = { .k = loader->k, .v = loader->v, .n_heads = loader->n_heads };
    const kvant_codec *source = l.k->sources[0];
    kvant_codec *made = NULL;
    kvant_cuda_tables tables;

    if (l.k->learns_key_transform)
        kvant_codec_unit_matrix(source, &made);
    tables = kvp_gpu_tables(made != NULL ? made : source);
    l.any = l.k->numbers.at;
    l.k_scale = tables.scale != NULL ? l.any : NULL;
    l.k_weights = tables.key_transform_size > 0 ? l.any : NULL;
    l.v_weights = kvp_gpu_tables(l.v->sources[0]).key_transform_size > 0 ? l.any : NULL;
    l.has_block_centers = made != NULL;
    if (kvant_cuda_codec_from(made != NULL ? made : source, &l.sealed, NULL, 0) == KVANT_OK &&
        kvant_cuda_codec_create_open(l.sealed, &l.open) == KVANT_OK &&
        kvant_cuda_codec_create_open(l.v->codec, &l.v_open) == KVANT_OK &&
        kvp_cu.stream_new(&l.stream, CU_NON_BLOCKING) == 0) {
        capture(&l, NULL);
        launch_first_graph(&l);
        kvp_cu.stream_free(l.stream);
    }
    kvant_cuda_codec_free(&l.v_open);
    kvant_cuda_codec_free(&l.open);
    kvant_cuda_codec_free(&l.sealed);
    kvant_codec_free(&made);
}

static void *run(void *context)
{
    kvp_gpu_loader *loader = context;

    if (kvp_gpu_enter(loader->k->gpu))
        load(loader);
    return NULL;
}

void kvp_gpu_load_kernels(const kvp_gpu_cells *keys, const kvp_gpu_cells *values, uint32_t n_heads)
{
    kvp_gpu_loader *loader = &keys->cache->loader;

    if (loader->k != NULL || values->cache != keys->cache)
        return;
    *loader = (kvp_gpu_loader){ .k = keys, .v = values, .n_heads = n_heads };
    loader->runs = kvant_os_start_thread(&loader->thread, run, loader, 0);
}

void kvp_gpu_load_finish(kvp_gpu_cache *cache)
{
    if (cache->loader.runs)
        pthread_join(cache->loader.thread, NULL);
    cache->loader.runs = false;
}
