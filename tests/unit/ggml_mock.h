/* ggml_mock.h - a mock of ggml's calls that make a graph of one custom node, for tests of the
 * plug-in's threads. It does nothing else; a test adds its own back-end calls. */
#ifndef KVANT_TESTS_GGML_MOCK_H
#define KVANT_TESTS_GGML_MOCK_H

#include "../../integrations/llama.cpp/ggml_api.h"

/* The operation of the graph and its argument. */
static struct {
    abi_custom_op op;
    void *user;
} mock_node;

static size_t mock_no_bytes(void)
{
    return 0;
}

static abi_context *mock_context(abi_init_params params)
{
    static int context;
    return (abi_context *)(void *)&context;
}

static abi_graph *mock_graph(abi_context *context)
{
    return (abi_graph *)(void *)context;
}

static abi_tensor *mock_custom(abi_context *context, int32_t type, int64_t ne0, int64_t ne1,
                               int64_t ne2, int64_t ne3, abi_tensor **args, int n_args,
                               abi_custom_op op, int n_tasks, void *user)
{
    static abi_tensor node;
    (void)context, (void)type, (void)ne0, (void)ne1, (void)ne2, (void)ne3;
    (void)args, (void)n_args, (void)n_tasks;
    mock_node.op = op;
    mock_node.user = user;
    return &node;
}

static void mock_expand(abi_graph *graph, abi_tensor *node)
{
}

static inline kvp_ggml mock_ggml(void)
{
    return (kvp_ggml){ .tensor_overhead = mock_no_bytes,
                       .graph_overhead = mock_no_bytes,
                       .init = mock_context,
                       .new_graph = mock_graph,
                       .custom_4d = mock_custom,
                       .build_forward_expand = mock_expand };
}

#endif
