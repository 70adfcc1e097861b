// A CUDA device that exists for autograd and dispatch only: with it, fake CUDA tensors have a backward pass in a PyTorch
// that was built without CUDA. Nothing here computes, allocates or waits.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;

struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  static Device one() { return Device(kCuda, 0); }
  static Stream only() { return Stream(Stream::DEFAULT, one()); }
  c10::DeviceType type() const override { return kCuda; }
  Device exchangeDevice(Device) const override { return one(); }
  Device getDevice() const override { return one(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return only(); }
  Stream getDefaultStream(Device) const override { return only(); }
  Stream getStreamFromGlobalPool(Device, bool = false) const override { return only(); }
  Stream getNewStream(Device, int = 0) const override { return only(); }
  Stream exchangeStream(Stream) const override { return only(); }
  void record(void** event, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)
}

// Returns 0 if PyTorch has a CUDA device of its own.
extern "C" int gspo_mega_install_fake_device() {
  auto& slot = c10::impl::device_guard_impl_registry[static_cast<size_t>(kCuda)];
  if (slot.load()) return 0;
  slot.store(new FakeGuard());
  return at::globalContext().hasCUDA() ? 1 : 0;
}
