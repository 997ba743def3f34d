/* offload.h - GPUs for which kvant has no kernels: Vulkan's, ROCm's, SYCL's and others.
 *
 * The GPU's own device keeps its name and its memory, and its own back end has the weights and
 * computes. kvant replaces a few functions in the device's table. From then on, caches that
 * llama.cpp wants on the device are kvant's, in the computer's memory, and kvant computes the
 * operations on them on the CPU. So llama.cpp's options for the device work as without kvant.
 */
#pragma once

#include <stddef.h>

/* Takes over every GPU of the process that is neither kvant's own nor on another computer. Returns
 * their number. Once, after the device KVANT is set up. */
size_t kvp_offload_setup(void);
