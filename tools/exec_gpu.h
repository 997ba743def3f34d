/* exec_gpu.h - messages of `kvant exec` about the GPUs that a program lists: the ones that hold
 * weights, the ones that stay unused, and the flags that would use them. It changes no flag;
 * exec_offload.h decides them. */
#pragma once

#include "exec_offload.h"

/* One line on stderr: which device holds weights and which the cache, where weights are on a
 * GPU; else where a listed GPU stays unused, and why. */
void gpu_report_unused(const program *p, const device_list *list, const gpu_plan *plan);

/* One line on stderr: whose attention --accel computes. */
void gpu_report_accel(const program *p, const device_list *list);
