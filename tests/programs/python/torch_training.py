"""PyTorch: element-wise work, matrix products, a convolution, streams and a few steps of training,
compared with the same on the CPU."""

import sys

import torch


def main() -> int:
    assert torch.cuda.is_available(), "torch sees no GPU"
    torch.manual_seed(3)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    a, b = torch.randn(300, 200), torch.randn(200, 150)
    x, y = a.cuda(), b.cuda()
    torch.testing.assert_close(
        (x * 2 + 1).sum(dim=0).cpu(), (a * 2 + 1).sum(dim=0), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close((x @ y).cpu(), a @ b, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(torch.sort(x, dim=1).values.cpu(), torch.sort(a, dim=1).values)

    images, weights = torch.randn(2, 3, 20, 20), torch.randn(4, 3, 3, 3)
    expected = torch.nn.functional.conv2d(images, weights, padding=1)
    got = torch.nn.functional.conv2d(images.cuda(), weights.cuda(), padding=1)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-3)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        z = x.relu()
        event = torch.cuda.Event()
        event.record()
    torch.cuda.current_stream().wait_event(event)
    torch.testing.assert_close((z + 1).cpu(), a.relu() + 1)

    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(4)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )
        data = torch.randn(256, 20)
        target = data.sum(dim=1, keepdim=True)
        model, data, target = model.to(device), data.to(device), target.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(20):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(data), target)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) <= 1e-2 * abs(losses[0]), losses
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
