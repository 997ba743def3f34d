/* device.h - the plug-in's two devices, and the back end instances that llama.cpp makes of them.
 * KVANT type GPU, because llama.cpp gives its KV cache to GPU devices (-ngl 99). It takes the few
 * operations that touch the cache and none that multiplies weights, so weights stay on the CPU.
 * KVANT_ACCEL type ACCEL, which llama.cpp adds to every context of a process. It takes
 * FLASH_ATTN_EXT nodes alone. The cache stays in host memory, in llama.cpp's own bytes; all other
 * nodes stay with the CPU back end.
 */
#pragma once

#include "abi.h"
#include "ops.h"

/* Prepares a device (KVANT: for back-end API 2 or 3) and returns it; the same pointer for the life
 * of the process. */
abi_device *kvp_device_setup(int api, abi_reg *reg);
abi_device *kvp_accel_setup(abi_reg *reg);

/* Gives the device KVANT the id and the type of a GPU. llama.cpp uses only the first device of an
 * id, unless --device names another. So it uses KVANT only when --device names it. */
void kvp_device_hide_behind(const char *id, int32_t type);

/* For ggml_backend_set_n_threads, which llama.cpp looks up by name. */
void kvp_backend_set_n_threads(abi_backend *backend, int n_threads);

/* KVANT's back end without its table, for other devices whose caches are in the computer's memory
 * (offload.h). `kvp_compute_create_for_cache` begins a llama.cpp context; NULL after a
 * message. `kvp_compute_cache_graph` computes nodes that touch such caches; all their other tensors
 * are in the computer's memory, too. `kvp_cache_supports` answers the scheduler for such a node. */
kvp_compute *kvp_compute_create_for_cache(void);
void kvp_compute_free(kvp_compute *compute);
void kvp_compute_set_n_threads(kvp_compute *compute, int n_threads);
int32_t kvp_compute_cache_graph(kvp_compute *compute, abi_graph *graph);
int32_t kvp_compute_cache_nodes(kvp_compute *compute, abi_graph *graph); /* on this thread */
bool kvp_cache_supports(const abi_tensor *op);
