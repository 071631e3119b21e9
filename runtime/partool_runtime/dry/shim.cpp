// Stands in for CUDA, in any build of torch, so that autograd accepts fake tensors of the device "cuda".
// Nothing here computes: streams are numbers, events are always complete. The library must be loaded before torch.

#include <atomic>
#include <memory>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

constexpr DeviceIndex kDevices = 64;
thread_local DeviceIndex current = 0;
thread_local StreamId current_streams[kDevices] = {};

DeviceIndex index_of(Device device) {
  return device.index() < 0 || device.index() >= kDevices ? current : device.index();
}

struct NoDeviceGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return DeviceType::CUDA;
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(DeviceType::CUDA, current);
  }
  void setDevice(Device device) const override {
    current = index_of(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current = index_of(device);
  }
  Stream getStream(Device device) const override {
    const DeviceIndex index = index_of(device);
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index), current_streams[index]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, index_of(device)));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<StreamId> next{1};
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index_of(device)), next++);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    static int recorded;
    *event = &recorded;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  int getNumGPUs() const override {
    return kDevices;
  }
  DeviceIndex current_device() const override {
    return current;
  }
  DeviceIndex getCurrentDevice() const override {
    return current;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    current = device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = current;
    current = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
};

std::unique_ptr<at::CUDAHooksInterface> make_hooks(at::CUDAHooksArgs arguments) {
  return std::make_unique<CUDAHooks>(arguments);
}

// A torch that was built for GPUs registers its own hooks later, with less priority.
const at::RegistererCUDAHooksRegistry hooks(
    "CUDAHooks", c10::REGISTRY_PREFERRED, at::CUDAHooksRegistry(), make_hooks);

} // namespace

// Call this after torch was imported: a torch that was built for GPUs has registered its own guard by then.
extern "C" void partool_guard_devices() {
  static const c10::impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new NoDeviceGuard());
}
