/* backend.h - back end instances, one per llama context and device: the shared part of the
 * plug-in's devices. */
#ifndef KVP_BACKEND_H
#define KVP_BACKEND_H

#include "ops.h"

/* An instance that belongs to the device; NULL without memory. The tables are copied. */
abi_backend *kvp_backend_create(abi_device *device, uint8_t (*guid)[16], const abi_backend_iface *iface);
void kvp_backend_free(abi_backend *backend);

/* For ggml_backend_set_n_threads, which llama.cpp looks up by name. */
void kvp_backend_set_n_threads(abi_backend *backend, int n_threads);

/* Computes the nodes that are to be computed, in order, until one fails. */
int32_t kvp_graph_compute(abi_backend *backend, abi_graph *graph,
                          int32_t (*compute_node)(kvp_compute *compute, abi_tensor *node));

/* Operations that compute nothing. */
bool kvp_is_view_op(const abi_tensor *op);

#endif /* KVP_BACKEND_H */
