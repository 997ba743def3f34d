/* test_abi_layout.c - the plug-in's own declarations (integrations/llama.cpp/abi.h) against the
 * real headers of the configured llama.cpp: sizes, offsets and constants. The compiler compares
 * them, so that scripts/dist.sh can check systems whose programs do not run here. */
#include <stddef.h>
#include <stdio.h>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <kvant/block_attention.h>

#include "abi.h"

#define SAME(ours, theirs)                                                                         \
    _Static_assert((long long)(ours) == (long long)(theirs), #ours " is not " #theirs)
#define SAME_SIZE(ours, theirs) SAME(sizeof(ours), sizeof(theirs))
#define SAME_FIELD(ours, theirs, field) SAME_FIELD_AS(ours, field, theirs, field)
#define SAME_FIELD_AS(ours, our_field, theirs, their_field)                                        \
    SAME(offsetof(ours, our_field), offsetof(theirs, their_field));                                \
    SAME(sizeof(((ours *)0)->our_field), sizeof(((theirs *)0)->their_field))

#if GGML_BACKEND_API_VERSION == 2
typedef abi_buft_iface_2 our_buft_iface;
typedef abi_buft_2 our_buft;
#elif GGML_BACKEND_API_VERSION == 3
typedef abi_buft_iface_3 our_buft_iface;
typedef abi_buft_3 our_buft;
#else
#error "this back-end API is not one that the plug-in serves"
#endif

SAME_SIZE(abi_tensor, struct ggml_tensor);
SAME_FIELD(abi_tensor, struct ggml_tensor, type);
SAME_FIELD(abi_tensor, struct ggml_tensor, buffer);
SAME_FIELD(abi_tensor, struct ggml_tensor, ne);
SAME_FIELD(abi_tensor, struct ggml_tensor, nb);
SAME_FIELD(abi_tensor, struct ggml_tensor, op);
SAME_FIELD(abi_tensor, struct ggml_tensor, op_params);
SAME_FIELD(abi_tensor, struct ggml_tensor, flags);
SAME_FIELD(abi_tensor, struct ggml_tensor, src);
SAME_FIELD(abi_tensor, struct ggml_tensor, view_src);
SAME_FIELD(abi_tensor, struct ggml_tensor, view_offs);
SAME_FIELD(abi_tensor, struct ggml_tensor, data);
SAME_FIELD(abi_tensor, struct ggml_tensor, name);
SAME_FIELD(abi_tensor, struct ggml_tensor, extra);
SAME_FIELD(abi_tensor, struct ggml_tensor, padding);

SAME_SIZE(our_buft, struct ggml_backend_buffer_type);
SAME_FIELD(our_buft, struct ggml_backend_buffer_type, iface);
SAME_FIELD(our_buft, struct ggml_backend_buffer_type, device);
SAME_FIELD(our_buft, struct ggml_backend_buffer_type, context);
SAME_FIELD(our_buft_iface, struct ggml_backend_buffer_type_i, get_name);
SAME_FIELD(our_buft_iface, struct ggml_backend_buffer_type_i, alloc_buffer);
SAME_FIELD(our_buft_iface, struct ggml_backend_buffer_type_i, get_alignment);
SAME_FIELD(our_buft_iface, struct ggml_backend_buffer_type_i, get_max_size);
SAME_FIELD(our_buft_iface, struct ggml_backend_buffer_type_i, get_alloc_size);
SAME_FIELD(our_buft_iface, struct ggml_backend_buffer_type_i, is_host);
#if GGML_BACKEND_API_VERSION == 3
SAME_FIELD(our_buft_iface, struct ggml_backend_buffer_type_i, alloc_buffer_n);
SAME_FIELD(our_buft_iface, struct ggml_backend_buffer_type_i, get_alloc_size_n);
#endif

SAME_SIZE(abi_buffer, struct ggml_backend_buffer);
SAME_FIELD(abi_buffer, struct ggml_backend_buffer, iface);
SAME_FIELD(abi_buffer, struct ggml_backend_buffer, buft);
SAME_FIELD(abi_buffer, struct ggml_backend_buffer, context);
SAME_FIELD(abi_buffer, struct ggml_backend_buffer, size);
SAME_FIELD(abi_buffer, struct ggml_backend_buffer, usage);
SAME_FIELD(abi_buffer_iface, struct ggml_backend_buffer_i, free_buffer);
SAME_FIELD(abi_buffer_iface, struct ggml_backend_buffer_i, get_base);
SAME_FIELD(abi_buffer_iface, struct ggml_backend_buffer_i, init_tensor);
SAME_FIELD(abi_buffer_iface, struct ggml_backend_buffer_i, memset_tensor);
SAME_FIELD(abi_buffer_iface, struct ggml_backend_buffer_i, set_tensor);
SAME_FIELD(abi_buffer_iface, struct ggml_backend_buffer_i, get_tensor);
SAME_FIELD(abi_buffer_iface, struct ggml_backend_buffer_i, set_tensor_2d);
SAME_FIELD(abi_buffer_iface, struct ggml_backend_buffer_i, get_tensor_2d);
SAME_FIELD(abi_buffer_iface, struct ggml_backend_buffer_i, cpy_tensor);
SAME_FIELD(abi_buffer_iface, struct ggml_backend_buffer_i, clear);
SAME_FIELD(abi_buffer_iface, struct ggml_backend_buffer_i, reset);

SAME_SIZE(abi_backend, struct ggml_backend);
SAME_FIELD(abi_backend, struct ggml_backend, guid);
SAME_FIELD(abi_backend, struct ggml_backend, iface);
SAME_FIELD(abi_backend, struct ggml_backend, device);
SAME_FIELD(abi_backend, struct ggml_backend, context);
SAME_FIELD(abi_backend_iface, struct ggml_backend_i, get_name);
SAME_FIELD(abi_backend_iface, struct ggml_backend_i, free);
SAME_FIELD(abi_backend_iface, struct ggml_backend_i, synchronize);
SAME_FIELD(abi_backend_iface, struct ggml_backend_i, graph_compute);
SAME_FIELD(abi_backend_iface, struct ggml_backend_i, event_record);
SAME_FIELD(abi_backend_iface, struct ggml_backend_i, event_wait);
SAME_FIELD(abi_backend_iface, struct ggml_backend_i, graph_optimize);
SAME_SIZE(abi_event, struct ggml_backend_event);
SAME_FIELD(abi_event, struct ggml_backend_event, device);
SAME_FIELD(abi_event, struct ggml_backend_event, context);
SAME(sizeof(ggml_guid), sizeof(*((abi_backend *)0)->guid));

SAME_SIZE(abi_graph, struct ggml_cgraph);
SAME_FIELD(abi_graph, struct ggml_cgraph, n_nodes);
SAME_FIELD(abi_graph, struct ggml_cgraph, n_leafs);
SAME_FIELD(abi_graph, struct ggml_cgraph, nodes);
SAME_FIELD(abi_graph, struct ggml_cgraph, grads);
SAME_FIELD(abi_graph, struct ggml_cgraph, leafs);
SAME_FIELD(abi_graph, struct ggml_cgraph, use_counts);
SAME_FIELD_AS(abi_graph, visited, struct ggml_cgraph, visited_hash_set);
SAME_FIELD(abi_graph, struct ggml_cgraph, order);
SAME_FIELD(abi_graph, struct ggml_cgraph, uid);

SAME_SIZE(abi_device, struct ggml_backend_device);
SAME_FIELD(abi_device, struct ggml_backend_device, iface);
SAME_FIELD(abi_device, struct ggml_backend_device, reg);
SAME_FIELD(abi_device, struct ggml_backend_device, context);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, get_name);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, get_description);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, get_memory);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, get_type);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, get_props);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, init_backend);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, get_buffer_type);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, get_host_buffer_type);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, buffer_from_host_ptr);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, supports_op);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, supports_buft);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, offload_op);
SAME_FIELD(abi_device_iface, struct ggml_backend_device_i, event_synchronize);
SAME_SIZE(abi_device_props, struct ggml_backend_dev_props);
SAME_FIELD(abi_device_props, struct ggml_backend_dev_props, name);
SAME_FIELD(abi_device_props, struct ggml_backend_dev_props, description);
SAME_FIELD(abi_device_props, struct ggml_backend_dev_props, memory_free);
SAME_FIELD(abi_device_props, struct ggml_backend_dev_props, memory_total);
SAME_FIELD(abi_device_props, struct ggml_backend_dev_props, type);
SAME_FIELD(abi_device_props, struct ggml_backend_dev_props, device_id);
SAME_FIELD(abi_device_props, struct ggml_backend_dev_props, caps);
SAME_FIELD(abi_device_caps, struct ggml_backend_dev_caps, async);
SAME_FIELD(abi_device_caps, struct ggml_backend_dev_caps, host_buffer);
SAME_FIELD(abi_device_caps, struct ggml_backend_dev_caps, buffer_from_host_ptr);
SAME_FIELD(abi_device_caps, struct ggml_backend_dev_caps, events);
SAME_FIELD(abi_device_caps, struct ggml_backend_dev_caps, mmap_support);

SAME_SIZE(abi_reg, struct ggml_backend_reg);
SAME_FIELD(abi_reg, struct ggml_backend_reg, api_version);
SAME_FIELD(abi_reg, struct ggml_backend_reg, iface);
SAME_FIELD(abi_reg, struct ggml_backend_reg, context);
SAME_FIELD(abi_reg_iface, struct ggml_backend_reg_i, get_name);
SAME_FIELD(abi_reg_iface, struct ggml_backend_reg_i, get_device_count);
SAME_FIELD(abi_reg_iface, struct ggml_backend_reg_i, get_device);
SAME_FIELD(abi_reg_iface, struct ggml_backend_reg_i, get_proc_address);
SAME_SIZE(abi_feature, struct ggml_backend_feature);
SAME_FIELD(abi_feature, struct ggml_backend_feature, name);
SAME_FIELD(abi_feature, struct ggml_backend_feature, value);
SAME_SIZE(abi_init_params, struct ggml_init_params);
SAME_FIELD(abi_init_params, struct ggml_init_params, mem_size);
SAME_FIELD(abi_init_params, struct ggml_init_params, mem_buffer);
SAME_FIELD(abi_init_params, struct ggml_init_params, no_alloc);

SAME(ABI_MAX_DIMS, GGML_MAX_DIMS);
SAME(ABI_MAX_SRC, GGML_MAX_SRC);
SAME(ABI_MAX_OP_PARAMS, GGML_MAX_OP_PARAMS);
SAME(ABI_MAX_NAME, GGML_MAX_NAME);
SAME(ABI_TYPE_F32, GGML_TYPE_F32);
SAME(ABI_TYPE_F16, GGML_TYPE_F16);
SAME(ABI_TYPE_I32, GGML_TYPE_I32);
SAME(ABI_TYPE_I64, GGML_TYPE_I64);
SAME(ABI_TYPE_BF16, GGML_TYPE_BF16);
SAME(ABI_STATUS_ALLOC_FAILED, GGML_STATUS_ALLOC_FAILED);
SAME(ABI_STATUS_FAILED, GGML_STATUS_FAILED);
SAME(ABI_STATUS_SUCCESS, GGML_STATUS_SUCCESS);
SAME(ABI_DEVICE_CPU, GGML_BACKEND_DEVICE_TYPE_CPU);
SAME(ABI_DEVICE_GPU, GGML_BACKEND_DEVICE_TYPE_GPU);
SAME(ABI_DEVICE_IGPU, GGML_BACKEND_DEVICE_TYPE_IGPU);
SAME(ABI_DEVICE_ACCEL, GGML_BACKEND_DEVICE_TYPE_ACCEL);
/* the public header's numbers are equal to ggml's */
SAME(KVANT_BLOCK_F32, GGML_TYPE_F32);
SAME(KVANT_BLOCK_F16, GGML_TYPE_F16);
SAME(KVANT_BLOCK_BF16, GGML_TYPE_BF16);
SAME(KVANT_BLOCK_Q4_0, GGML_TYPE_Q4_0);
SAME(KVANT_BLOCK_Q4_1, GGML_TYPE_Q4_1);
SAME(KVANT_BLOCK_Q5_0, GGML_TYPE_Q5_0);
SAME(KVANT_BLOCK_Q5_1, GGML_TYPE_Q5_1);
SAME(KVANT_BLOCK_Q8_0, GGML_TYPE_Q8_0);
SAME(KVANT_BLOCK_IQ4_NL, GGML_TYPE_IQ4_NL);
SAME(ABI_N_TASKS_MAX, GGML_N_TASKS_MAX);
SAME(ABI_TENSOR_FLAG_COMPUTE, GGML_TENSOR_FLAG_COMPUTE);
SAME(ABI_USAGE_COMPUTE, GGML_BACKEND_BUFFER_USAGE_COMPUTE);
SAME(sizeof(enum ggml_type), sizeof(int32_t));
SAME(sizeof(enum ggml_op), sizeof(int32_t));
SAME(sizeof(enum ggml_status), sizeof(int32_t));
SAME(sizeof(enum ggml_backend_dev_type), sizeof(int32_t));

int main(void)
{
    printf("back-end API %d\n", GGML_BACKEND_API_VERSION);
    return 0;
}
