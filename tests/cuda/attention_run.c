/* attention_run.c - one call of attention, with every query row checked, and the replay of a
 * graph whose call need not wait for others. */
#include "attention_fixture.h"

kvant_cuda_kernel_attention_args attention_args(const fixture *f)
{
    const attention_case *c = f->c;
    const kvant_cuda_pages none = {
        NULL, 0, 0
    }; /* then kernels that do not know exact pages run even where there are exact pages */
    kvant_cuda_kernel_attention_args args = {
        .size = sizeof(kvant_cuda_kernel_attention_args),
        .k_codec = f->cache.gpu_k,
        .v_codec = f->cache.gpu_v,
        .k = cache_pages(&f->cache, KVANT_ROLE_K),
        .v = cache_pages(&f->cache, KVANT_ROLE_V),
        .k_open = c->open ? open_pages(&f->open, KVANT_ROLE_K) : none,
        .v_open = c->open ? open_pages(&f->open, KVANT_ROLE_V) : none,
        .block_table = f->gpu_table,
        .table_stride = f->blocks_per_row,
        .blocks_per_row = f->blocks_per_row,
        .lengths = f->gpu_lengths,
        .batch = c->batch,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .type = c->type,
        .q = f->gpu_q,
        .q_batch_stride = (size_t)f->p.query_tokens * c->n_heads * c->head_dim,
        .q_head_stride = c->head_dim,
        .out = f->gpu_out,
        .out_batch_stride = (size_t)f->p.query_tokens * c->n_heads * c->head_dim,
        .out_head_stride = c->head_dim,
        .lse = f->gpu_lse,
        .scale = 1 / sqrtf((float)c->head_dim),
        .v_center = f->gpu_center,
        .k_scale = f->gpu_k_scale,
        .v_scale = f->gpu_v_scale,
        .workspace = f->workspace,
        .workspace_bytes = f->workspace_bytes,
        .query_tokens = f->p.query_tokens,
        .query_starts = f->gpu_starts,
        .q_token_stride = (size_t)c->n_heads * c->head_dim,
        .out_token_stride = (size_t)c->n_heads * c->head_dim,
        .causal = f->p.causal,
        .window = f->p.window,
        .logit_softcap = f->p.softcap,
        .max_bias = f->p.max_bias,
        .mask = f->gpu_mask,
        .mask_token_stride = f->mask_stride,
        .sinks = f->gpu_sinks,
        .k_center = f->gpu_k_center,
        .n_matrices = f->p.matrices,
        .matrices = f->gpu_matrices,
        .q_matrix_stride = (size_t)f->n_rows * c->n_heads * c->head_dim,
        .page_offsets = f->gpu_offsets
    };
    memcpy(args.q_ids, f->q_ids, sizeof args.q_ids);
    return args;
}

static void check_rows(fixture *f, const kvant_cuda_kernel_attention_args *args, uint8_t *out,
                       float *lse)
{
    const attention_case *c = f->c;
    assert_int_equal(kvant_cuda_kernel_attention(args, NULL), KVANT_OK);
    check_cuda(cudaDeviceSynchronize());
    device_read(out, f->gpu_out, f->out_bytes);
    device_read(lse, f->gpu_lse, (size_t)f->n_rows * c->n_heads * sizeof *lse);
    for (uint32_t b = 0; b < c->batch; b++)
        for (uint32_t i = 0; i < query_tokens_of(f, b); i++)
            for (uint32_t h = 0; h < c->n_heads; h++)
                check_head(f, out, lse, b, i, h);
}

/* With out_type, results are the F32 results, rounded. */
static void check_out_types(fixture *f, kvant_cuda_kernel_attention_args args, const float *out)
{
    const kvant_cuda_type types[] = { KVANT_CUDA_F16, KVANT_CUDA_BF16 };
    const size_t n = f->out_bytes / sizeof *out;
    uint16_t *found = malloc(n * sizeof *found);
    for (int t = 0; t < 2; t++) {
        args.out_type = types[t];
        check_cuda(cudaMemset(f->gpu_out, 0xff, f->out_bytes));
        assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_OK);
        device_read(found, f->gpu_out, n * sizeof *found);
        for (size_t i = 0; i < n; i++)
            if (from_type(found, i, types[t]) != round_to_type(out[i], types[t]))
                fail_msg("number %zu is %g with type %d and %g in F32", i,
                         (double)from_type(found, i, types[t]), types[t], (double)out[i]);
    }
    free(found);
}

void run_problem(const attention_case *c, const attention_problem *p)
{
    fixture f;
    fixture_open(&f, c, p);
    kvant_cuda_kernel_attention_args args = attention_args(&f);
    uint8_t *out = malloc(f.out_bytes), *again = malloc(f.out_bytes);
    float *lse = malloc((size_t)f.n_rows * c->n_heads * sizeof *lse);
    check_rows(&f, &args, out, lse);
    if (args.page_offsets) { /* the call computes offsets of pages itself */
        args.page_offsets = NULL;
        check_cuda(cudaMemset(f.gpu_offsets, 0xff, f.offset_bytes));
        args.plain_queries =
            (kvant_cuda_plain_queries){ .q = f.plain_queries.q,
                                        .type = f.plain_queries.type,
                                        .q_batch_stride = f.plain_queries.q_batch_stride,
                                        .q_token_stride = f.plain_queries.q_token_stride,
                                        .q_head_stride = f.plain_queries.q_head_stride,
                                        .block_centers = f.plain_queries.block_centers,
                                        .offsets = f.gpu_offsets };
        check_rows(&f, &args, out, lse);
    }
    if (c->type == KVANT_CUDA_F32)
        check_out_types(&f, args, (const float *)out);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check_cuda(cudaStreamCreate(&stream));
    args.clear_counters = 1;
    /* no other call runs, so this one need not wait */
    args.table_ready = args.sealed_ready = args.plain_queries.ready = 1;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    assert_int_equal(kvant_cuda_kernel_attention(&args, stream), KVANT_OK);
    check_cuda(cudaStreamEndCapture(stream, &graph));
    check_cuda(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; i++) {
        check_cuda(cudaMemsetAsync(f.gpu_out, 0xff, f.out_bytes, stream));
        check_cuda(cudaMemsetAsync(f.workspace, 0xff, KVANT_CUDA_COUNTER_BYTES, stream));
        check_cuda(cudaGraphLaunch(exec, stream));
        check_cuda(cudaStreamSynchronize(stream));
        device_read(again, f.gpu_out, f.out_bytes);
        assert_memory_equal(again, out, f.out_bytes);
    }
    printf("%-28s %-28s d %3u  kv %u  q %2u  batch %3u  type %d  open %u", c->k_spec, c->v_spec,
           c->head_dim, c->n_kv_heads, c->n_heads, c->batch, c->type, c->open);
    if (p)
        printf("  tokens %u%s%s%s%s%s%s%s%s  window %u  softcap %g  bias %g  matrices %u",
               p->query_tokens, p->counts ? " ragged" : "", p->causal ? " causal" : "",
               p->mask ? " mask" : "", p->sinks ? " sinks" : "", p->scratch ? " scratch" : "",
               p->key_center ? " centre" : "", p->page_centers ? " centres" : "",
               p->hidden ? " hidden" : "", p->window, p->softcap, p->max_bias, p->matrices);
    printf(": error / bound %.3f\n", f.worst);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    free(out);
    free(again);
    free(lse);
    fixture_close(&f);
}

void run_attention(const attention_case *c)
{
    run_problem(c, NULL);
}
