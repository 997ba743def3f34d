/* accel.c - KVANT_ACCEL on a GPU: attention of few query tokens over llama.cpp's own q8_0 and q4_0
 * cache, in CUDA's buffers. ggml-cuda computes all other nodes, prompts included. */
#include "gpu.h"

#include <string.h>

#include "../ggml_api.h"
#include "../log.h"

static bool is_on;

void kvp_gpu_set_accel(bool on)
{
    is_on = on;
}

bool kvp_gpu_accel(void)
{
    return is_on;
}

static kvant_cuda_block_rows rows_of(const abi_tensor *view)
{
    return (kvant_cuda_block_rows){ .type = (uint32_t)view->type,
                                    .data = view->data,
                                    .token_stride = view->nb[1],
                                    .head_stride = view->nb[2],
                                    .batch_stride = view->ne[3] > 1 ? view->nb[3] : 0 };
}

static kvant_cuda_block_args arguments_of(const abi_tensor *node)
{
    const abi_tensor *q = node->src[0], *k = node->src[1], *mask = node->src[3],
                     *sinks = node->src[4];
    float parameters[3]; /* scale, max_bias, logit_softcap */

    memcpy(parameters, node->op_params, sizeof(parameters));
    return (kvant_cuda_block_args){
        .size = sizeof(kvant_cuda_block_args),
        .k = rows_of(k),
        .v = rows_of(node->src[2]),
        .head_dim = (uint32_t)k->ne[0],
        .n_tokens = (uint32_t)k->ne[1],
        .batch = (uint32_t)q->ne[3],
        .query_tokens = (uint32_t)q->ne[1],
        .n_heads = (uint32_t)q->ne[2],
        .n_kv_heads = (uint32_t)k->ne[2],
        .q = q->data,
        .q_batch_stride = q->nb[3] / sizeof(float),
        .q_token_stride = q->nb[1] / sizeof(float),
        .q_head_stride = q->nb[2] / sizeof(float),
        .out = node->data,
        .out_batch_stride = node->nb[3] / sizeof(float),
        .out_token_stride = node->nb[2] / sizeof(float),
        .out_head_stride = node->nb[1] / sizeof(float),
        .scale = parameters[0],
        .max_bias = mask != NULL ? parameters[1] : 0,
        .logit_softcap = parameters[2],
        .mask = mask != NULL ? mask->data : NULL,
        .mask_batch_stride = mask != NULL && mask->ne[3] > 1 ? mask->nb[3] / sizeof(uint16_t) : 0,
        .mask_token_stride = mask != NULL ? mask->nb[1] / sizeof(uint16_t) : 0,
        .sinks = sinks != NULL ? sinks->data : NULL
    };
}

bool kvp_gpu_accelerates(const abi_tensor *node)
{
    kvant_cuda_block_args args;

    if (!is_on || node->op != kvp_api.op.flash_attn_ext || !kvp_block_attention_supported(node) ||
        node->src[1]->ne[0] != node->src[2]->ne[0])
        return false;
    args = arguments_of(node);
    return kvant_cuda_block_workspace(&args) > 0;
}

int32_t kvp_gpu_accelerate(kvp_gpu_backend *b, const abi_tensor *node)
{
    kvant_cuda_block_args args = arguments_of(node);
    kvant_status status;

    if (!kvp_gpu_grow(b->gpu, &b->workspace, kvant_cuda_block_workspace(&args), true))
        return ABI_STATUS_ALLOC_FAILED;
    args.workspace = b->workspace.at;
    args.workspace_bytes = b->workspace.bytes;
    status = kvant_cuda_block_attention(&args, b->gpu->stream);
    if (status != KVANT_OK)
        kvp_error("%s: the GPU could not compute attention: %s", node->name,
                  kvant_strerror(status));
    return status == KVANT_OK ? ABI_STATUS_SUCCESS : ABI_STATUS_FAILED;
}
