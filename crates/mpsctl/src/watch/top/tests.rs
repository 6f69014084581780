//! A model with answers of the service, for the tests of `state` and `draw`.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::{Value, json};

use super::*;
use common::bus::rows::Device;

pub(super) fn listed<R: serde::de::DeserializeOwned>(row: &Value) -> Listed<R> {
    Listed::read(row.as_object().unwrap().clone()).unwrap()
}

pub(super) fn client(row: &Value) -> Listed<Client> {
    listed(row)
}

fn slice(ordinal: u32) -> Listed<Device> {
    let mut row = json!({
        "addr": format!("00:06.0-{ordinal}"), "nvidia_index": 0, "model": "NVIDIA H200", "healthy": true,
        "limits_enforced": true, "mps_memory_limit": 5760, "mps_thread_percentage": 25, "max_clients": 12,
        "clients": ordinal, "memory_used": 1440 * ordinal,
    });
    match ordinal {
        1 => row["limits_enforced"] = false.into(),
        2 => (row["drained"], row["healthy"]) = (true.into(), false.into()),
        3 => {
            row["healthy"] = false.into();
            row["reason"] = "GPU is lost; nothing but a reset of the GPU or of the host heals this".into();
        }
        _ => {}
    }
    listed(&row)
}

/// Four slices of one GPU, each in another state, and three clients.
pub(super) fn model() -> Model {
    with_slices(4)
}

pub(super) fn with_slices(slices: u32) -> Model {
    let service = listed(&json!({
        "version": "1.0.0", "state": "degraded", "state_reason": "1 of 4 slices\u{1b} not served",
        "driver_version": "580.159.04",
    }));
    let events = (0..20).map(|at| {
        let text = format!(
            "event {at} of a control daemon that has much to tell about itself and about its servers"
        );
        listed(&json!({"at": 1_795_264_496_000_000_i64 + at * 60_000_000, "text": text}))
    });
    let mut model = Model::default();
    model.publish(Ok(TopAnswers {
        service,
        devices: Some((0..slices).map(slice).collect()),
        events: events.collect(),
    }));
    model.list(Ok(vec![
        client(&json!({
            "pid": 101, "gpu": "GPU-1", "device": "00:06.0-0,00:06.0-1", "command": "大模型训练", "user": "worker",
            "memory_mib": 700, "container_id": "4f1c2d3e5a6b7c8d",
        })),
        client(&json!({
            "pid": 102, "gpu": "GPU-1", "device": "00:06.0-1", "command": "train\u{1b}", "user": "worker",
            "memory_mib": 1440,
        })),
        client(&json!({"pid": 103, "gpu": "GPU-1", "bypass": true, "command": "mine", "user": "root"})),
    ]));
    model
}

pub(super) fn press(state: &mut TopState, model: &Model, keys: &str) -> Action {
    let mut action = Action::Draw;
    for key in keys.chars() {
        let event = match key {
            '\t' => KeyEvent::from(KeyCode::Tab),
            '\n' => KeyEvent::from(KeyCode::Enter),
            '\u{1b}' => KeyEvent::from(KeyCode::Esc),
            '\u{3}' => KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL),
            '\u{1a}' => KeyEvent::new(KeyCode::Char('z'), KeyModifiers::CONTROL),
            key => KeyEvent::from(KeyCode::Char(key)),
        };
        action = state.key(event, model);
    }
    action
}
