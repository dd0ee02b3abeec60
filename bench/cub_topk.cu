// CUB's DeviceTopK behind a C interface for ctypes: the k largest of n floats and their indices, in any order.
// The only configuration that the header offers: ties and order are left open.

#include <cub/device/device_topk.cuh>
#include <cuda/iterator>

#include <cstdint>

// Returns a cudaError_t. Called with workspace == nullptr it only sets *workspace_bytes.
extern "C" int cub_topk(void* workspace, size_t* workspace_bytes, const float* keys, float* top_keys,
                        std::uint32_t* top_indices, std::int64_t n, std::int64_t k, cudaStream_t stream) {
  const auto requirements = cuda::execution::require(cuda::execution::determinism::not_guaranteed,
                                                     cuda::execution::output_ordering::unsorted);
  const auto environment = cuda::std::execution::env{cuda::stream_ref{stream}, requirements};
  const auto indices = cuda::counting_iterator<std::uint32_t>{0};
  return cub::DeviceTopK::MaxPairs(workspace, *workspace_bytes, keys, top_keys, indices, top_indices,
                                   static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(k), environment);
}
