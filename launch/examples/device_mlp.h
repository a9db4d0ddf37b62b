// The model of nccl_train.cu on one GPU: pixels - hidden - 10, ReLU, softmax cross entropy, Adam; in CUDA and
// cuBLAS, float32. All of it is enqueued on one stream and waits for nothing.
//
// Matrices are row-major, a sample or an output a row. cuBLAS takes them for column-major, so for their
// transposes.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <source_location>
#include <vector>

#include "holdfast/tensor_view.h"

namespace holdfast::example {

// A rank that cannot go on leaves at once: others may be in a collective that it will not come to. Their
// watchdogs, or the deadline, see to them.
[[noreturn]] inline void leave(const char* why, int exit_code, const std::source_location& where) {
  std::fprintf(stderr, "%s:%u: %s\n", where.file_name(), static_cast<unsigned>(where.line()), why);
  std::_Exit(exit_code);
}
using Where = std::source_location;
inline void must(cudaError_t code, const Where& where = Where::current()) {
  if (code != cudaSuccess) leave(cudaGetErrorString(code), 80, where);
}
inline void must(cublasStatus_t code, const Where& where = Where::current()) {
  if (code != CUBLAS_STATUS_SUCCESS) leave(cublasGetStatusString(code), 80, where);
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    must(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)));
    must(cudaMemset(data_, 0, count * sizeof(T)));
  }
  ~DeviceArray() { static_cast<void>(cudaFree(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  std::size_t size() const { return count_; }
  // Waits for `stream`.
  std::vector<T> read(cudaStream_t stream) const {
    std::vector<T> host(count_);
    must(cudaStreamSynchronize(stream));
    must(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  T* data_ = nullptr;
  const std::size_t count_;
};

// ---- kernels: one thread an element, a sample or a column

constexpr unsigned kThreads = 256;

// The comparisons below are such that a NaN passes: fmaxf(NaN, 0) is 0, and would hide it from the guard.
static __global__ void bias_relu(float* values, const float* bias, int width, int count) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= count) return;
  const float value = values[i] + bias[i % width];
  values[i] = value < 0 ? 0 : value;
}

static __global__ void relu_backward(float* gradient, const float* activation, int count) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i < count && activation[i] <= 0) gradient[i] = 0;
}

// Of one sample: its logits become the gradient of the batch's mean loss.
static __global__ void softmax_loss(float* logits, const float* bias, const int* labels, int classes,
                                    int batch, float* losses, int* correct) {
  const int sample = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (sample >= batch) return;
  float* row = logits + sample * classes;
  const int label = labels[sample];
  int best = 0;
  for (int c = 0; c < classes; ++c) {
    row[c] += bias[c];
    if (row[c] > row[best]) best = c;
  }
  const float top = row[best];
  const float wanted = row[label] - top;
  float sum = 0;
  for (int c = 0; c < classes; ++c) sum += expf(row[c] - top);
  losses[sample] = logf(sum) - wanted;
  correct[sample] = best == label ? 1 : 0;
  for (int c = 0; c < classes; ++c) {
    row[c] = (expf(row[c] - top) / sum - (c == label ? 1.0f : 0.0f)) / static_cast<float>(batch);
  }
}

// In the order of the rows, so that the bits are the same each time.
static __global__ void sum_rows(const float* rows, int batch, int width, float* sums) {
  const int column = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (column >= width) return;
  float sum = 0;
  for (int r = 0; r < batch; ++r) sum += rows[r * width + column];
  sums[column] = sum;
}

struct AdamStep {
  float rate;             // of the schedule
  float mean_correction;  // 1 / (1 - 0.9^t), t updates with this one
  float square_correction;
  float gradient_scale;  // 1 / ranks: the gradients are a sum
};

// Does nothing when the flag is up. Multiplying the step by zero would not do: zero times NaN is NaN.
static __global__ void adam(float* parameters, float* means, float* squares, const float* gradients,
                            int count, AdamStep step, const std::uint32_t* skip) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= count || *skip != 0) return;
  const float gradient = gradients[i] * step.gradient_scale;
  means[i] = 0.9f * means[i] + 0.1f * gradient;
  squares[i] = 0.999f * squares[i] + 0.001f * gradient * gradient;
  parameters[i] -=
      step.rate * means[i] * step.mean_correction / (sqrtf(squares[i] * step.square_correction) + 1e-8f);
}

// cudaLaunchKernel takes untyped pointers; this way they point to what the kernel expects.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), int threads, cudaStream_t stream, Parameters... arguments) {
  void* pointers[] = {&arguments...};
  const dim3 blocks((static_cast<unsigned>(threads) + kThreads - 1) / kThreads);
  must(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), blocks, dim3(kThreads), pointers, 0, stream));
}

// ---- the model

struct MlpSizes {
  int pixels = 784;
  int hidden = 256;  // a multiple of 4, for the alignment of what is behind it
  int classes = 10;
  int batch = 64;  // of this rank

  int weights1() const { return hidden * pixels; }
  int weights2() const { return classes * hidden; }
  int parameters() const { return weights1() + hidden + weights2() + classes; }
};

class DeviceMlp {
 public:
  static constexpr const char* kNames[4] = {"hidden.weight", "hidden.bias", "output.weight", "output.bias"};

  DeviceMlp(const MlpSizes& of, cudaStream_t stream)
      : sizes(of),
        inputs(static_cast<std::size_t>(sizes.batch * sizes.pixels)),
        labels(static_cast<std::size_t>(sizes.batch)),
        losses(labels.size()),
        correct(labels.size()),
        parameters(static_cast<std::size_t>(sizes.parameters())),
        gradients(parameters.size()),
        stream_(stream),
        hidden_(static_cast<std::size_t>(sizes.batch * sizes.hidden)),
        hidden_gradient_(hidden_.size()),
        logits_(static_cast<std::size_t>(sizes.batch * sizes.classes)),
        means_(parameters.size()),
        squares_(parameters.size()) {
    must(cublasCreate(&blas_));
    must(cublasSetStream(blas_, stream));
  }
  ~DeviceMlp() { static_cast<void>(cublasDestroy(blas_)); }
  DeviceMlp(const DeviceMlp&) = delete;
  DeviceMlp& operator=(const DeviceMlp&) = delete;

  // From inputs and labels to losses and correct.
  void forward() {
    const float* weights = parameters.data();
    multiply(CUBLAS_OP_T, CUBLAS_OP_N, sizes.hidden, sizes.batch, sizes.pixels, weights, sizes.pixels,
             inputs.data(), sizes.pixels, hidden_.data());
    const int count = sizes.batch * sizes.hidden;
    launch(bias_relu, count, stream_, hidden_.data(), weights + bias1(), sizes.hidden, count);
    multiply(CUBLAS_OP_T, CUBLAS_OP_N, sizes.classes, sizes.batch, sizes.hidden, weights + weights2(),
             sizes.hidden, hidden_.data(), sizes.hidden, logits_.data());
    launch(softmax_loss, sizes.batch, stream_, logits_.data(), weights + bias2(),
           static_cast<const int*>(labels.data()), sizes.classes, sizes.batch, losses.data(), correct.data());
  }

  // After forward(): the gradients of the mean of the losses.
  void backward() {
    const float* output = logits_.data();  // their gradient, since forward()
    multiply(CUBLAS_OP_N, CUBLAS_OP_T, sizes.hidden, sizes.classes, sizes.batch, hidden_.data(), sizes.hidden,
             output, sizes.classes, gradients.data() + weights2());
    launch(sum_rows, sizes.classes, stream_, output, sizes.batch, sizes.classes, gradients.data() + bias2());
    multiply(CUBLAS_OP_N, CUBLAS_OP_N, sizes.hidden, sizes.batch, sizes.classes,
             parameters.data() + weights2(), sizes.hidden, output, sizes.classes, hidden_gradient_.data());
    const int count = sizes.batch * sizes.hidden;
    const float* hidden_gradient = hidden_gradient_.data();
    launch(relu_backward, count, stream_, hidden_gradient_.data(), static_cast<const float*>(hidden_.data()),
           count);
    multiply(CUBLAS_OP_N, CUBLAS_OP_T, sizes.pixels, sizes.hidden, sizes.batch, inputs.data(), sizes.pixels,
             hidden_gradient, sizes.hidden, gradients.data());
    launch(sum_rows, sizes.hidden, stream_, hidden_gradient, sizes.batch, sizes.hidden,
           gradients.data() + bias1());
  }

  // With the gradients that were summed over the ranks, unless the flag in device memory is up.
  void update(const float* sums, const AdamStep& step, const std::uint32_t* skip) {
    launch(adam, sizes.parameters(), stream_, parameters.data(), means_.data(), squares_.data(), sums,
           sizes.parameters(), step, skip);
  }

  // The tensors of a bucket that is laid out as the parameters are, by kNames.
  std::vector<TensorView> tensors(const float* bucket) const {
    return {TensorView::contiguous(bucket, DType::kFloat32, sizes.weights1()),
            TensorView::contiguous(bucket + bias1(), DType::kFloat32, sizes.hidden),
            TensorView::contiguous(bucket + weights2(), DType::kFloat32, sizes.weights2()),
            TensorView::contiguous(bucket + bias2(), DType::kFloat32, sizes.classes)};
  }

  const MlpSizes sizes;
  const DeviceArray<float> inputs;  // batch x pixels
  const DeviceArray<int> labels;
  const DeviceArray<float> losses;  // by sample
  const DeviceArray<int> correct;   // by sample, 0 or 1
  const DeviceArray<float> parameters;
  const DeviceArray<float> gradients;

 private:
  int bias1() const { return sizes.weights1(); }
  int weights2() const { return bias1() + sizes.hidden; }
  int bias2() const { return weights2() + sizes.weights2(); }

  // c = op(a) op(b) as cuBLAS sees it: m x k, k x n and, without gaps, m x n.
  void multiply(cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const float* a,
                int a_rows, const float* b, int b_rows, float* c) {
    const float one = 1;
    const float zero = 0;
    must(cublasSgemm(blas_, op_a, op_b, m, n, k, &one, a, a_rows, b, b_rows, &zero, c, m));
  }

  const cudaStream_t stream_;
  cublasHandle_t blas_ = nullptr;
  const DeviceArray<float> hidden_;           // batch x hidden
  const DeviceArray<float> hidden_gradient_;  // batch x hidden
  const DeviceArray<float> logits_;           // batch x classes; their gradient, after forward()
  const DeviceArray<float> means_;            // Adam's, as the parameters are laid out
  const DeviceArray<float> squares_;
};

}  // namespace holdfast::example
