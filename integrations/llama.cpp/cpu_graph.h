/* cpu_graph.h - nodes on caches inside the graphs of llama.cpp's CPU back end.
 *
 * ggml's scheduler cuts a graph where the back end changes, which is twice per layer when KVANT
 * computes a layer's attention. Each part starts llama.cpp's threads and makes a plan, which takes
 * longer than attention over a short context. So the CPU back end takes a context's whole graph,
 * and its threads run kvant's functions for the nodes on caches.
 *
 * The CPU takes the nodes after llama.cpp has looked for the device of attention, because
 * llama.cpp uses no flash attention if this is not the device of the cache. If a node reads a cache
 * that kvant does not compute, KVANT gets the context's nodes back: ggml copies a cache for such a
 * node between back ends alone. KVANT_HOST_THREADS=0 leaves the CPU back end alone. */
#pragma once

#include "ops.h"

/* From now on CPU back ends that are created can compute nodes on caches. The first call in a
 * process replaces functions of the CPU's device. It changes nothing when the process exports no
 * CPU back end. May be called from several threads. */
void kvp_cpu_graph_use(void);

/* The next back end that this thread creates on the CPU's device belongs to the same context as
 * `compute`; NULL: it belongs to none. */
void kvp_cpu_graph_expect(kvp_compute *compute);

/* No graph uses `compute` any more. */
void kvp_cpu_graph_forget(const kvp_compute *compute);

/* llama.cpp has looked for the device of the context's attention: from the next graph on the CPU
 * back end takes nodes on its caches. The first function is called before each graph is computed;
 * NULL is no context. The second one is called when memory is planned for a node's result. */
void kvp_cpu_graph_begin(struct kvp_layers *layers);
void kvp_cpu_graph_note_size(const abi_tensor *node);

/* Whether the CPU back end takes a node on this tensor's cache. The answer also holds for the
 * questions about buffer types that the scheduler asks on this thread until the next call. */
bool kvp_cpu_graph_takes(const abi_tensor *cache);

/* A node reads the cache that kvant does not compute. */
void kvp_cpu_graph_end(const abi_tensor *cache);
