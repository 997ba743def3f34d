/* backend.c - see backend.h. */
#include "backend.h"

#include <stdlib.h>

#include "ggml_api.h"
#include "log.h"
#include "settings.h"

/* Until llama.cpp says otherwise, which it does before every graph. */
#define DEFAULT_N_THREADS 2

abi_backend *kvp_backend_create(abi_device *device, uint8_t (*guid)[16], const abi_backend_iface *iface)
{
    abi_backend *backend = calloc(1, sizeof(*backend));
    kvp_compute *compute = calloc(1, sizeof(*compute));
    char err[256] = "";
    bool lend;

    if (!kvp_settings_read_switch("KVANT_HOST_THREADS", kvp_api.tested, &lend, err, sizeof(err)))
        kvp_error("%s", err);
    if (err[0] != '\0' || backend == NULL || compute == NULL) {
        free(backend);
        free(compute);
        return NULL;
    }
    if (lend)
        kvp_host_threads_use(&compute->host_threads);
    compute->n_threads = DEFAULT_N_THREADS;
    *backend = (abi_backend){ .guid = guid, .iface = *iface, .device = device, .context = compute };
    return backend;
}

void kvp_backend_free(abi_backend *backend)
{
    kvp_compute_release(backend->context);
    free(backend->context);
    free(backend);
}

void kvp_backend_set_n_threads(abi_backend *backend, int n_threads)
{
    kvp_compute *compute = backend->context;

    compute->n_threads = n_threads > 0 ? (uint32_t)n_threads : 1;
    kvp_host_threads_update(&compute->host_threads);
}

int32_t kvp_graph_compute(abi_backend *backend, abi_graph *graph,
                          int32_t (*compute_node)(kvp_compute *compute, abi_tensor *node))
{
    kvp_compute *compute = backend->context;
    int32_t status = ABI_STATUS_SUCCESS;
    int n = kvp_api.graph_n_nodes(graph);

    kvp_host_threads_borrow(&compute->host_threads);
    for (int i = 0; i < n && status == ABI_STATUS_SUCCESS; i++) {
        abi_tensor *node = kvp_api.graph_node(graph, i);
        if ((node->flags & ABI_TENSOR_FLAG_COMPUTE) != 0)
            status = compute_node(compute, node);
    }
    kvp_host_threads_return(&compute->host_threads);
    return status;
}

bool kvp_is_view_op(const abi_tensor *op)
{
    return op->op == kvp_api.op.none || op->op == kvp_api.op.view || op->op == kvp_api.op.permute ||
           op->op == kvp_api.op.reshape || op->op == kvp_api.op.transpose;
}
