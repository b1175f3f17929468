//! What is on the wire, byte by byte.

use crate::testing::{connected, create, frame, stop};

#[tokio::test]
async fn a_reply_of_any_size_is_framed_so_that_go_can_read_it() {
    let (_runtime, connection, _plugin) = connected().await;

    for size in (4000..4100).chain([8000, 65_536, 1 << 20, (4 << 20) - 100]) {
        connection.take_frames();
        let response = create(&connection, &size.to_string()).await.unwrap();
        assert_eq!(response.adjust.annotations["large"].len(), size);
        let frames = connection.take_frames();
        assert!(frames[0] <= 4096, "{size}: {frames:?}");
        assert!(frames.len() <= 2, "{size}: {frames:?}");
    }
}

#[tokio::test]
async fn frames_of_unknown_connections_are_dropped() {
    let (_runtime, connection, mut plugin) = connected().await;

    connection.send_raw(frame(0, b"reserved"));
    connection.send_raw(frame(7, &vec![0xff; 70_000]));
    connection.send_raw(frame(3, b""));
    stop(&connection, "app").await;
    plugin.called_with("stop_container web/app").await;
}

#[tokio::test]
async fn a_frame_larger_than_any_message_ends_the_connection() {
    let (runtime, connection, mut plugin) = connected().await;

    connection.send_raw([1u32.to_be_bytes(), u32::MAX.to_be_bytes()].concat());
    assert_eq!(connection.ended().await, "the plugin closed the connection");
    plugin.called_with("disconnected").await;
    runtime.accept().await.welcome().await;
    plugin.settled().await;
}
